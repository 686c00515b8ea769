"""MTP layers that come with a target's checkpoint, under the names that others gave them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, modeling_layers

from decode import generate, load_drafter
from decode.common.errors import InputError
from decode.drafters.layers import under
from decode.drafters.mtp import MTPDraft
from decode.drafters.saved_draft import load_own
from decode.models.hidden_states import FINAL, Taps
from tests.tiny import tiny_llama

QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "norm": "mtp.norm",
    "": "mtp.layers.0.",
}
DEEPSEEK = {"norm": "model.layers.2.shared_head.norm", "": "model.layers.2."}
MIMO = {
    "enorm": "model.mtp_layers.0.token_layernorm",
    "hnorm": "model.mtp_layers.0.hidden_layernorm",
    "eh_proj": "model.mtp_layers.0.input_proj",
    "norm": "model.mtp_layers.0.final_layernorm",
    "": "model.mtp_layers.0.",
}
LAYOUTS = {"qwen": QWEN, "deepseek": DEEPSEEK, "mimo": MIMO}


def qwen3() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)


def weights_of(model: PreTrainedModel, seed: int = 5) -> dict[str, Tensor]:
    """Random weights of a layer like the model's own ones, by our names."""
    layer = {name: torch.zeros_like(one) for name, one in model.base_model.layers[0].state_dict().items()}  # type: ignore[union-attr,operator]
    width = model.config.hidden_size
    layer |= {f"{name}.weight": torch.zeros(width) for name in ("enorm", "hnorm", "norm")}
    layer["eh_proj.weight"] = torch.zeros(width, 2 * width)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(one.shape, generator=generator) * 0.3 + (one.dim() == 1) for name, one in layer.items()}


def saved(folder: Path, model: PreTrainedModel, weights: dict[str, Tensor], names: dict[str, str]) -> PreTrainedModel:
    """The target with these weights beside its own, under a layout's names, loaded again."""
    model.save_pretrained(folder)
    theirs = {}
    for name, tensor in weights.items():
        part, _, kind = name.rpartition(".")
        theirs[f"{names[part]}.{kind}" if part in names else f"{names['']}{name}"] = tensor.contiguous()
    if names is MIMO:
        first, second = weights["eh_proj.weight"].chunk(2, 1)
        theirs["model.mtp_layers.0.input_proj.weight"] = torch.cat([second, first], 1)
    file = folder / "model.safetensors"
    save_file(load_file(file) | theirs, file, metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval().requires_grad_(False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [tiny_llama, qwen3])
def test_each_layout_is_the_same_layer(tmp_path: Path, layout: str, make) -> None:  # noqa: ANN001
    model = make()
    weights = weights_of(model)
    found = load_own(saved(tmp_path, model, weights, LAYOUTS[layout])).state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_the_target_drafts_for_itself_without_a_draft_folder(tmp_path: Path) -> None:
    model = qwen3()
    model = saved(tmp_path, model, weights_of(model), QWEN)
    drafter = load_drafter("mtp", target=model)
    ids = torch.tensor([[3, 9, 4]])
    plain = generate(model, None, ids, max_new_tokens=20, eos_token_id=(), seed=0)
    drafted = generate(model, drafter, ids, max_new_tokens=20, eos_token_id=(), num_draft_tokens=3, seed=0)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert any(one.drafted for one in drafted.stats.rounds)


@pytest.mark.skipif(not hasattr(modeling_layers, "MtpLayer"), reason="transformers is older than its MtpLayer")
def test_its_layer_is_the_one_that_transformers_runs(tmp_path: Path) -> None:
    """One step over a whole text, against transformers' own module with the same weights."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

    model = qwen3()
    weights = weights_of(model)
    draft = load_own(saved(tmp_path, model, weights, QWEN))
    assert isinstance(draft, MTPDraft)
    theirs = modeling_layers.MtpLayer(model.config, Qwen3DecoderLayer, Qwen3RMSNorm, 0)
    theirs.load_state_dict({_transformers_name(name): one for name, one in weights.items()})
    ids = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    taps = Taps(model, (FINAL,))
    with torch.no_grad(), taps:
        model(ids)
    hidden, tokens, positions = taps.stacked()[:, :-1], ids[:, 1:], torch.arange(8)[None]
    causal = torch.ones(8, 8, dtype=torch.bool).tril()[None]
    ours = draft.advance(draft.fuse(hidden), tokens, positions, lambda keys, values: under(keys, values, causal))
    turned = model.base_model.rotary_emb(hidden[:, :, 0], positions)  # type: ignore[union-attr,operator]
    want = theirs(model.get_input_embeddings()(tokens), hidden[:, :, 0], turned, causal[:, None], positions, None)
    torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-5)


def _transformers_name(name: str) -> str:
    if name.startswith("norm."):
        return f"post_{name}"
    return name if name.startswith(("enorm", "hnorm", "eh_proj")) else f"mtp_block.{name}"


@pytest.mark.parametrize("missing", ["mlp.up_proj.weight", "enorm.weight"])
def test_a_layer_of_another_make_is_refused(tmp_path: Path, missing: str) -> None:
    model = qwen3()
    weights = {name: one for name, one in weights_of(model).items() if name != missing}
    with pytest.raises(InputError, match=missing.replace(".", r"\.")):
        load_own(saved(tmp_path, model, weights, QWEN))


def test_a_target_without_one_is_refused(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(InputError, match="draft=mtp"):
        load_drafter("mtp", target=model)


def test_weights_that_are_not_those_beside_the_layer_are_refused(tmp_path: Path) -> None:
    model = qwen3()
    model = saved(tmp_path, model, weights_of(model), QWEN)
    load_drafter("mtp", target=model.bfloat16())
    model.get_parameter("model.layers.1.self_attn.q_proj.weight").mul_(1.1)
    with pytest.raises(InputError, match=r"1 other tensors.*layers\.1\.self_attn\.q_proj"):
        load_drafter("mtp", target=model)
    load_drafter("mtp", target=model, check=False)
