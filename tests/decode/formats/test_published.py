"""Heads as others publish them: found by what the folder holds, drafted with, and computed as their authors do; what is
no head is left to who reads language models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from decode import generate, load_drafter
from decode.drafters.base import Batch
from decode.drafters.dspark import DSparkConfig
from decode.drafters.head_draft import HeadDraft
from decode.drafters.saved_draft import describe_draft
from decode.formats.form import published_form
from decode.models.load import describe_loaded
from tests.decode.formats.folders import DRAFTED, PUBLISHED, VOCAB, save_target
from tests.decode.heads import batch_of
from tests.tiny import save_tiny_target
from train.check.replicas import REPLICAS
from train.check.replicas.base import Served

pytestmark = pytest.mark.usefixtures("uncaptured")

EAGLE = (2, 4, 5)
TAPS = {"yuhuili": EAGLE, "RedHatAI": EAGLE, "SpecForge": EAGLE} | dict.fromkeys(("FasterDecoding", "TGI"), (-1,))
TAPS |= dict.fromkeys(("AngelSlim", "speculators-qwen3", "z-lab", "deepseek-ai"), (2, 4, 6))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(save_target(tmp_path_factory.mktemp("target")))


def publish(who: str, folder: Path, target: LlamaForCausalLM) -> Path:
    return PUBLISHED[who][0](folder / "a-name-that-tells-nothing", target.model.embed_tokens.weight.detach())


@pytest.mark.parametrize("who", PUBLISHED)
def test_a_published_head_drafts_what_its_target_writes(who: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    _, form, family = PUBLISHED[who]
    folder = publish(who, tmp_path, target)
    head = load_drafter(folder, target=target)
    described = describe_draft(str(folder), describe_loaded(target))
    assert published_form(folder) == form
    assert described.family == family
    assert isinstance(head, HeadDraft)
    assert described.num_parameters == sum(one.numel() for one in head.parameters()) + (
        0 if head.vocab is None else len(head.vocab)
    )
    assert head.taps == TAPS[who]
    prompts = torch.randint(4, VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 20, "temperature": 0.0, "eos_token_id": ()}
    drafted = generate(target, head, prompts, **settings)
    assert torch.equal(drafted.sequences, generate(target, None, prompts, **settings).sequences)
    assert any(one.drafted for one in drafted.stats.rounds)


@pytest.mark.parametrize("who", PUBLISHED)
def test_its_logits_are_those_of_its_authors_method(who: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Computed by plain functions from the file's own tensors, which share nothing with our modules."""
    folder = publish(who, tmp_path, target)
    head = load_drafter(folder, target=target)
    assert isinstance(head, HeadDraft)
    texts = torch.randint(4, VOCAB, (1, 16), generator=torch.Generator().manual_seed(0)).tolist()
    batch = batch_of(target, head, texts)
    steps = min(4, head.config.depth)
    ours, places = of_head(head, batch, steps)
    served = as_published(folder, target, head)
    assert batch.features is not None
    theirs = REPLICAS[PUBLISHED[who][1]](served, batch.ids[0], batch.features[0], places, steps)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        inside = one.isfinite()
        assert torch.allclose(one[inside], other[inside], atol=1e-4)


def of_head(head: HeadDraft, batch: Batch, steps: int) -> tuple[list[Tensor], Tensor]:
    """Logits (N, V) of each step at places (N,) of the last committed token."""
    if isinstance(head.config, DSparkConfig):
        head.config = replace(head.config, anchors=64)  # a block behind every token
    found = list(head.unroll(batch))[:steps]
    at = [torch.where(one.valid[0], one.target_rows[0] - step, -1).tolist() for step, one in enumerate(found)]
    places = sorted(set.intersection(*map(set, at)) - {-1, 0})
    logits = [
        head.widened(one.head(one.hidden[0, [own.index(place) for place in places]])).float()
        for one, own in zip(found, at, strict=True)
    ]
    return logits, torch.tensor(places)


def as_published(folder: Path, target: LlamaForCausalLM, head: HeadDraft) -> Served:
    """The file's tensors by the names that replicas know, with fields that transformers would put in."""
    written = json.loads((folder / "config.json").read_text())
    fields = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, **written, **(written.get("transformer_layer_config") or {})}
    fields["norm_before_residual"] = written.get("norm_before_residual", False)
    fields.setdefault("head_dim", 8)
    file = next(one for one in folder.iterdir() if one.name != "config.json")
    tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    renamed = {}
    for name, one in tensors.items():
        name = name.replace("midlayer.", "layers.0.")
        parts = name.split(".")
        if parts[0].isdigit():
            name = (
                f"blocks.{parts[0]}.layers.{parts[1]}.{parts[3]}" if len(parts) == 4 else f"lm_heads.{parts[0]}.weight"
            )
        renamed[name] = one.float()
    embedding, rows = target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach()
    drafted = DRAFTED if head.vocab is not None else None
    return Served(fields, renamed, embedding, rows, drafted, embedding[7:8])


def test_a_language_model_is_no_head(tmp_path: Path) -> None:
    assert published_form(save_tiny_target(tmp_path / "lm")) is None


def test_a_quantised_language_model_is_none_either(tmp_path: Path) -> None:
    """Types of tensors are looked at in heads alone."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({name: torch.zeros(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    assert published_form(tmp_path) is None


@pytest.mark.parametrize("content", ["{", "[]", '{"architectures": 3}', "{}"])
def test_what_its_own_reader_refuses_is_left_to_it(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    assert published_form(tmp_path) is None
