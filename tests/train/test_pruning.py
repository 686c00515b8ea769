"""Pruned drafts: which parts of a model they keep, and that zeros stay zero whatever trains them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from decode import generate, load_drafter
from decode.common.errors import ConfigError
from decode.config import ModelConfig
from decode.models.compatibility import attention_of
from decode.models.describe import ModelDescription
from tests.tiny import tiny_tokenizer
from tests.train.kills import differences
from tests.train.test_processes import LAUNCHER, launch, on_two_ranks
from tests.train.toy import command, metrics, save_target, tiny_config
from train.drafts.lm_blueprint import LMBlueprint, lm_blueprint
from train.drafts.pruning.kept_parts import heaviest_channels, heaviest_groups, without_parts
from train.drafts.pruning.lasting_zeros import fix_zeros, kept_places, put_zeros, zero_share
from train.drafts.pruning.pruned_shape import KINDS, kept_layers, pruned_config
from train.drafts.pruning.pruning_config import PruningConfig
from train.stage import run

HALF, TWO_OF_FOUR = {"sparsity": 0.5}, {"sparsity": 0.5, "pattern": "2:4"}


def pruned(target: Path, **pruning: Any) -> dict[str, Any]:
    return {"init_from": str(target), "pruning": pruning}


def matrices(run_folder: Path) -> dict[str, Tensor]:
    """Of the exported layers."""
    weights = load_file(run_folder / "model" / "model.safetensors")
    return {name: value for name, value in weights.items() if "_proj.weight" in name}


def check_zeros(run_folder: Path, target: Path, pruning: dict[str, Any]) -> None:
    """Exactly those of the smallest weights of the model that it started from; the others were trained."""
    before = load_file(target / "model.safetensors")
    for name, after in matrices(run_folder).items():
        kept = kept_places(before[name], PruningConfig(**pruning))
        assert torch.equal(after != 0, kept), name
        assert not torch.equal(after, before[name] * kept), name


@pytest.mark.parametrize("pruning", [HALF, {"sparsity": 0.3}, TWO_OF_FOUR])
def test_the_largest_weights_of_a_matrix_are_kept(pruning: dict[str, Any]) -> None:
    weight = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    kept = kept_places(weight, PruningConfig(**pruning))
    assert int((~kept).sum()) == round(pruning["sparsity"] * weight.numel())
    if "pattern" in pruning:
        fours, sizes = kept.unflatten(1, (-1, 4)), weight.abs().unflatten(1, (-1, 4))
        assert (fours.sum(2) == 2).all()
        assert (sizes.masked_fill(~fours, 9).amin(2) > sizes.masked_fill(fours, 0).amax(2)).all()
    else:
        assert weight[kept].abs().min() > weight[~kept].abs().max()


def test_zeros_are_plain_weights_once_they_are_fixed(target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(target)
    names, ids = set(model.state_dict()), torch.arange(9)[None]
    put_zeros(model, PruningConfig(sparsity=0.75))
    logits = model(ids).logits
    assert zero_share(model) == 0.75
    fix_zeros(model)
    assert set(model.state_dict()) == names
    assert zero_share(model) == 0.75
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("pruning", [HALF, TWO_OF_FOUR])
def test_zeros_stay_zero_through_training(
    tmp_path: Path, target: Path, records: Path, optimizer: str, pruning: dict[str, Any]
) -> None:
    """Momentum, weight decay and Muon's orthogonal updates reach every weight of a matrix."""
    other, tmp_path = save_target(tmp_path / "other", seed=1), tmp_path / "run"  # one that has all to learn
    draft = pruned(other, **pruning)
    run(tiny_config(tmp_path, target, records=str(records), draft=draft, optimizer=optimizer, weight_decay=0.1))
    check_zeros(tmp_path, other, pruning)
    told = json.loads((tmp_path / "result.json").read_text())
    assert told["zero_share"] == 0.5
    provenance = json.loads((tmp_path / "model" / "draftsmith.json").read_text())
    assert provenance["measured"]["zero_share"] == 0.5
    assert provenance["config"]["draft"]["pruning"]["sparsity"] == 0.5
    card = (tmp_path / "model" / "README.md").read_text()
    assert "50.0% are zero" in card
    assert f"Before training: alpha {told['start']['alpha']:.4f}" in card


def test_what_the_pruned_model_was_worth_before_its_first_step_is_told(
    tmp_path: Path, target: Path, records: Path
) -> None:
    """And it is kept where training only makes it worse: here nothing is left out, and p is the target's own."""
    draft = pruned(target, layers=2)
    run(tiny_config(tmp_path, target, records=str(records), draft=draft, lr=1.0))
    told, first = json.loads((tmp_path / "result.json").read_text()), metrics(tmp_path, "validation")[0]
    assert (first["step"], first["alpha"]) == (0, told["start"]["alpha"])
    assert told["start"]["alpha"] > 0.98
    assert told["step"] == 0


@pytest.mark.parametrize("pruning", [HALF, {"layers": 1, "mlp_width": 40, "heads": 1, "sparsity": 0.5}])
def test_a_resumed_run_ends_with_the_same_bits(
    tmp_path: Path, target: Path, records: Path, pruning: dict[str, Any]
) -> None:
    changes: dict[str, Any] = {"records": str(records), "draft": pruned(target, **pruning), "keep_checkpoints": 9}
    run(tiny_config(tmp_path / "whole", target, **changes))
    middle = tmp_path / "whole" / "checkpoints" / "step_00000003"
    run(tiny_config(tmp_path / "rest", target, **changes, resume=str(middle)))
    assert differences(tmp_path / "whole", tmp_path / "rest") == []
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "rest")]
    assert results[0] == results[1]


def test_a_pruned_draft_drafts_and_changes_no_text(tmp_path: Path, target: Path, records: Path) -> None:
    draft = pruned(target, layers=1, mlp_width=40, heads=1, sparsity=0.5)
    run(tiny_config(tmp_path, target, records=str(records), draft=draft))
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    drafter, ids = load_drafter(str(tmp_path / "model"), target=model), torch.arange(20, 28)[None]
    told: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.0, "seed": 3}
    ours, alone = (generate(model, one, ids, **told) for one in (drafter, None))
    assert torch.equal(ours.sequences, alone.sequences)
    assert ours.stats.tau > 1


@pytest.mark.engines
@pytest.mark.parametrize(
    ("engine", "precision"), [("ddp", "fp32"), ("deepspeed_zero2", "bf16"), ("deepspeed_zero3", "bf16")]
)
def test_zeros_stay_zero_where_ranks_share_weights(
    tmp_path: Path, target: Path, records: Path, engine: str, precision: str
) -> None:
    """Also where an engine keeps and updates a copy of the weights of its own."""
    other, tmp_path = save_target(tmp_path / "other", seed=1), tmp_path / "run"
    settings = on_two_ranks(tmp_path, target, records, engine, draft=pruned(other, **HALF), weight_decay=0.1)
    settings["engine"]["precision"] = precision
    launch(command(settings, LAUNCHER))
    check_zeros(tmp_path, other, HALF)


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.3,
    "attention_bias": True, "sliding_window": 3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
UNUSED_CHANNELS, UNUSED_GROUP = [0, 7, 20, 21], 1
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def random_kind(kind: str) -> PreTrainedModel:
    """In fp64, with biases that count."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config), dtype=torch.float64)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    return model.eval().requires_grad_(False)


def with_unused_parts(kind: str) -> PreTrainedModel:
    """Some channels and one group of heads write nothing."""
    model = random_kind(kind)
    for layer in model.base_model.layers:  # type: ignore[union-attr]
        layer.mlp.down_proj.weight[:, UNUSED_CHANNELS] = 0.0
        layer.self_attn.o_proj.weight.view(48, 3, 16)[:, UNUSED_GROUP] = 0.0
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_its_unused_parts_computes_the_same(kind: str, tmp_path: Path) -> None:
    """Of every type that is known, and as a folder that transformers loads."""
    model = with_unused_parts(kind)
    config = pruned_config(model.config, PruningConfig(mlp_width=44, heads=4), "there")
    pruned = without_parts(model, config).eval()
    assert pruned.num_parameters() < model.num_parameters()
    torch.testing.assert_close(pruned(IDS).logits, model(IDS).logits, rtol=1e-10, atol=1e-10)
    pruned.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention_of(config))
    assert torch.equal(loaded(IDS).logits, pruned(IDS).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_kept_whole_in_their_order_with_their_kind(kind: str) -> None:
    """As if the others, which add nothing, were not there."""
    model = random_kind(kind)
    config = pruned_config(model.config, PruningConfig(layers=3), "there")
    pruned: Any = without_parts(model, config).eval()
    layers: Any = model.base_model.layers
    for place, kept in enumerate((0, 2, 4)):
        for ours, theirs in zip(pruned.model.layers[place].parameters(), layers[kept].parameters(), strict=True):
            assert torch.equal(ours, theirs)
    if getattr(model.config, "layer_types", None):
        assert config.layer_types == [model.config.layer_types[kept] for kept in (0, 2, 4)]


@pytest.mark.parametrize(
    ("total", "count", "kept"), [(8, 1, [0]), (8, 2, [0, 7]), (5, 3, [0, 2, 4]), (4, 4, [0, 1, 2, 3])]
)
def test_kept_layers_are_spread_from_the_first_to_the_last(total: int, count: int, kept: list[int]) -> None:
    assert kept_layers(total, count) == kept


def test_the_weight_of_a_part_is_the_product_of_its_slices() -> None:
    """Whatever moves from one matrix into the next: twice up, half down."""
    model: Any = random_kind("llama")
    mlp, attention = model.model.layers[0].mlp, model.model.layers[0].self_attn
    mlp.gate_proj.weight[5] *= 100
    mlp.up_proj.weight[9] *= 1e3
    mlp.down_proj.weight[:, 9] /= 1e6
    found = heaviest_channels(mlp, 10).tolist()
    assert 5 in found
    assert 9 not in found
    assert found == sorted(found)
    attention.v_proj.weight[8:16] *= 1e3
    attention.k_proj.weight[16:24] *= 1e2
    assert heaviest_groups(attention, 3, 2).tolist() == [1, 2]


def described(config: PretrainedConfig) -> ModelDescription:
    return ModelDescription(ModelConfig(path="there"), config)


def blueprint(monkeypatch: pytest.MonkeyPatch, config: PretrainedConfig, **pruning: Any) -> LMBlueprint:
    monkeypatch.setattr("train.drafts.lm_blueprint.describe_model", lambda *_, **__: described(config))
    monkeypatch.setattr("train.drafts.lm_blueprint.check_same_tokens", lambda *_: None)
    cfg = tiny_config(Path("out"), Path("there"), records="r", draft={"init_from": "there", "pruning": pruning})
    return lm_blueprint(cfg, described(config), tiny_tokenizer())


def test_a_plan_counts_what_is_left_and_says_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("llama", **SIZES)
    whole, pruned = blueprint(monkeypatch, config), blueprint(monkeypatch, config, layers=2, mlp_width=24)
    assert pruned.num_parameters < whole.num_parameters / 2
    assert pruned.weights_per_token < whole.weights_per_token / 2
    assert whole.made_from is None
    assert pruned.made_from == (
        f"there of {whole.num_parameters:,} parameters, pruned to {pruned.num_parameters:,} "
        "(pruning.layers=2 pruning.mlp_width=24)"
    )
    assert config.num_hidden_layers == 5  # the target's own is as it was


@pytest.mark.parametrize(
    ("kind", "pruning", "message"),
    [
        ("llama", {"layers": 6}, "draft.pruning.layers=6 are to be kept, and draft.init_from=there has 5"),
        ("llama", {"mlp_width": 49}, r"draft.pruning.mlp_width=49 .* has 48 \(intermediate_size\).*Give 48 or fewer"),
        ("llama", {"heads": 8}, "draft.pruning.heads=8 .* has 6"),
        ("llama", {"heads": 3}, "draft.pruning.heads=3, and 2 query heads of .* share.*Give a multiple of 2"),
        ("llama", {"mlp_width": 47, "sparsity": 0.5, "pattern": "2:4"}, "goes by fours.* 48, 47, 16 weights"),
        (
            "wide",
            {"heads": 10},
            r"draft.pruning.heads=10 leaves a llama model .* do not load: .*\(48\) is not a multiple",
        ),
        ("gpt2", {"layers": 1}, "draft.init_from=there is of type gpt2"),
        ("mixtral", {"sparsity": 0.5}, "of type mixtral"),
    ],
)
def test_what_a_model_does_not_have_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, kind: str, pruning: dict[str, Any], message: str
) -> None:
    sizes = {"llama": SIZES, "wide": SIZES | {"num_attention_heads": 12, "num_key_value_heads": 6}}.get(kind, {})
    config = AutoConfig.for_model("llama" if sizes else kind, **sizes)
    with pytest.raises(ConfigError, match=message):
        blueprint(monkeypatch, config, **pruning)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"pruning": {"layers": 1}}, "pruning.layers=1 leaves out parts of a saved model, and init_from is null"),
        ({"pruning": {"layers": 0}}, "pruning.layers=0 must be at least 1"),
        ({"pruning": {"sparsity": 1.0}}, "pruning.sparsity=1.0 is the share"),
        ({"pruning": {"sparsity": 0.0}}, "pruning.sparsity=0.0 is the share"),
        ({"pruning": {"pattern": "2:4"}}, "pruning.pattern=2:4 sets half .*, and pruning.sparsity=None"),
        ({"pruning": {"pattern": "1:4"}}, "pattern = '1:4' must be one of '2:4'"),
        (
            {"init_from": "x", "pruning": {"sparsity": 0.5}, "lora": {"rank": 2}},
            "lora.rank=2 with pruning.sparsity=0.5",
        ),
        ({"family": "eagle3", "width": None, "pruning": {"layers": 1}}, "pruning.layers=1 is for family lm"),
    ],
)
def test_pruning_that_means_nothing_is_refused(draft: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(Path("out"), Path("there"), records="r", draft=draft)
