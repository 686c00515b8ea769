"""A draft model whose vocabulary is padded otherwise than its target's drafts, and is trained further, over the tokens
that both know."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PhiConfig, PreTrainedModel

from decode import generate, load_drafter
from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.drafters.lm import LMDraft
from decode.models.describe import describe_model
from tests.decode.checks import ragged_prompts
from tests.tiers import by_default
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.train.toy import tiny_config, write_corpus
from train.drafts.lm_blueprint import lm_blueprint
from train.stage import run

TOKENS = 300
SIZES = [(320, 304), (304, 320), (320, 300), (300, 320)]
"""Rows of the target and of the draft."""


def save(folder: Path, model: PreTrainedModel, tokens: int = TOKENS) -> Path:
    """With a tokenizer of so many tokens."""
    model.save_pretrained(folder)
    tiny_tokenizer(tokens).save_pretrained(folder)
    return folder


def target_in(folder: Path, rows: int) -> Path:
    return save(folder, tiny_llama(rows, eos_token_id=0, pad_token_id=1))


def draft_of(kind: str, rows: int) -> PreTrainedModel:
    """With untied ends, tied ones, or an output head with a bias."""
    if kind != "biased":
        return tiny_llama(
            rows, num_layers=1, seed=3, tie_word_embeddings=kind == "tied", eos_token_id=0, pad_token_id=1
        )
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = PhiConfig(vocab_size=rows, **sizes, bos_token_id=0, eos_token_id=0, initializer_range=0.3)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_config(config).eval()
    model.lm_head.bias.data.normal_()
    return model


@pytest.mark.parametrize("kind", by_default(1, ["tied", "untied", "biased"]))
@pytest.mark.parametrize(("rows", "drafts"), by_default(1, SIZES))
def test_a_folder_drafts_the_tokens_that_both_know(
    rows: int, drafts: int, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = draft_of(kind, drafts)
    folder = save(tmp_path / "draft", own)
    target = AutoModelForCausalLM.from_pretrained(target_in(tmp_path / "target", rows))
    with caplog.at_level(logging.INFO, "draftsmith"):
        drafter = load_drafter(folder, target=target)
    said = [one.getMessage() for one in caplog.records if "rows were" in one.getMessage()]
    what = "cut" if drafts > rows else "added"
    assert len(said) == 1
    assert f"{abs(rows - drafts)} rows were {what}" in said[0]
    assert isinstance(drafter, LMDraft)
    ids, common = torch.tensor([[5, 9, 2, 7]]), min(rows, drafts)
    with torch.no_grad():
        logits = drafter.model(ids).logits
        assert logits.shape[-1] == rows
        assert torch.allclose(logits[..., :common], own(ids).logits[..., :common], atol=1e-5)
    prompts, mask = ragged_prompts(2)
    for temperature in (0.0, 1.0):
        call: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": (), "seed": 0, "temperature": temperature}
        drafted = generate(target, drafter, prompts, mask, **call)
        assert torch.equal(drafted.sequences, generate(target, None, prompts, mask, **call).sequences)


@pytest.mark.parametrize("tree", by_default(1, ["chain", "dynamic", "2x2"]))
def test_no_row_that_only_pads_is_drafted(tree: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Copies of a padding row that is drafted all the time, did it stand for a token."""
    model = draft_of("biased", 304)
    model.lm_head.bias.data[TOKENS:] = 50.0
    target = AutoModelForCausalLM.from_pretrained(target_in(tmp_path / "target", 320))
    drafter = load_drafter(save(tmp_path / "draft", model), target=target)
    drafted: list[torch.Tensor] = []
    propose = drafter.propose

    def kept(context: Any) -> Any:
        tree = propose(context)
        drafted.append(tree.tokens[:, 1:].flatten())
        return tree

    monkeypatch.setattr(drafter, "propose", kept)
    prompts, mask = ragged_prompts(2)
    generate(target, drafter, prompts, mask, max_new_tokens=12, eos_token_id=(), seed=0, num_draft_tokens=2, tree=tree)
    assert drafted
    assert torch.cat(drafted).max() < TOKENS


def test_other_tokens_are_still_refused(tmp_path: Path) -> None:
    target = target_in(tmp_path / "target", 320)
    described = AutoModelForCausalLM.from_pretrained(target)
    more = save(tmp_path / "more", draft_of("tied", 340), tokens=330)  # more tokens than the target has rows
    fewer = save(tmp_path / "fewer", draft_of("tied", 304), tokens=290)
    nameless = tmp_path / "nameless"
    draft_of("tied", 304).save_pretrained(nameless)
    for folder in (more, fewer, nameless):
        with pytest.raises(InputError, match=r"vocabulary entries.*320"):
            load_drafter(folder, target=described)
    with pytest.raises(InputError, match="304 vocabulary entries.*320"):
        load_drafter(draft_of("tied", 304), target=described)  # in memory, it stays what it is


@pytest.mark.parametrize("kind", ["untied", "tied", "biased"])
@pytest.mark.parametrize(("rows", "drafts"), SIZES)
def test_training_starts_from_the_same_rows(rows: int, drafts: int, kind: str, tmp_path: Path) -> None:
    own, target = draft_of(kind, drafts), target_in(tmp_path / "target", rows)
    given = {"init_from": str(save(tmp_path / "draft", own)), "width": None, "heads": None}
    text = {"name": "text", "path": "nowhere"}
    cfg = tiny_config(tmp_path / "run", target, target_source="live", data=text, draft=given)
    blueprint = lm_blueprint(cfg, describe_model(ModelConfig(path=str(target))), None)
    model = blueprint.build().model
    assert sum(one.numel() for one in model.parameters()) == blueprint.num_parameters
    common = min(rows, drafts)
    for ours, theirs in zip(tables(model), tables(own), strict=True):
        assert ours.requires_grad
        assert len(ours) == rows
        assert torch.equal(ours[:common], theirs[:common])
        filler = theirs[-1] if drafts > TOKENS else theirs.mean(0)
        assert torch.allclose(ours[common:], filler.expand_as(ours[common:]))
    first, last, *_ = tables(model)
    assert (first is last) == (kind == "tied")


def tables(model: Any) -> list[nn.Parameter]:
    head = model.get_output_embeddings()
    return [model.get_input_embeddings().weight, head.weight, *([] if head.bias is None else [head.bias])]


@pytest.mark.parametrize("changes", [{}, {"pruning": {"layers": 1}}])
def test_what_was_trained_so_has_the_targets_rows(changes: dict[str, Any], tmp_path: Path) -> None:
    target = target_in(tmp_path / "target", 320)
    own = save(tmp_path / "draft", tiny_llama(304, seed=3, eos_token_id=0, pad_token_id=1))
    given = {"init_from": str(own), "width": None, "heads": None} | changes
    text = {"name": "text", "path": str(write_corpus(tmp_path / "corpus")), "validation_share": 0.2}
    steps = {"steps": 2, "validate_every": 2, "checkpoint_every": 2}
    run(tiny_config(tmp_path / "run", target, target_source="live", data=text, draft=given, **steps))
    weights = load_file(tmp_path / "run/model/model.safetensors")
    assert weights["model.embed_tokens.weight"].shape[0] == 320
    load_drafter(tmp_path / "run", target=AutoModelForCausalLM.from_pretrained(target))
