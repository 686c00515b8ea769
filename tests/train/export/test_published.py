"""What is exported is read back as a published head: the same weights, the same drafts."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from decode import generate, load_drafter
from decode.drafters.head_draft import HeadDraft
from tests.train.check.folders import DRAFTS, Folders

OWN = ("lm_head.weight",)
"""What a folder ships and the head that was exported takes from its target."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("served"))


@pytest.mark.usefixtures("uncaptured")
@pytest.mark.parametrize("draft", DRAFTS)
def test_an_exported_head_is_read_back_as_it_was(draft: str, folders: Folders) -> None:
    target = LlamaForCausalLM.from_pretrained(folders.target("llama"))
    saved, read = (
        load_drafter(folder, target=target)
        for folder in (folders.draft("llama", draft), folders.exported("llama", draft))
    )
    assert isinstance(saved, HeadDraft)
    assert isinstance(read, HeadDraft)
    ours, theirs = saved.state_dict(), read.state_dict()
    assert {*theirs} - {*OWN} == {*ours}
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())
    if "lm_head.weight" in theirs:
        rows = target.lm_head.weight
        assert torch.equal(theirs["lm_head.weight"], rows if saved.vocab is None else rows[saved.vocab])
    prompts = torch.randint(4, 300, (2, 6), generator=torch.Generator().manual_seed(0))
    for temperature in (0.0, 1.0):
        settings = {"max_new_tokens": 24, "temperature": temperature, "seed": 1, "eos_token_id": ()}
        one, other = (generate(target, head, prompts, **settings) for head in (saved, read))
        assert one.stats.rounds == other.stats.rounds
        assert torch.equal(one.sequences, other.sequences)
