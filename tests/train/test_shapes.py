"""The draft that a configuration means, field by field, on a target none of whose sizes is a default."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from decode.common.errors import ConfigError, InputError
from decode.config import ModelConfig
from decode.drafters.dspark import DSparkConfig
from decode.drafters.head_draft import HeadDraft
from decode.models.describe import ModelDescription, describe_model
from decode.models.weight_counts import count_weights
from tests import commands
from tests.architectures import random_config
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.train.overfit import built_head
from tests.train.toy import head_config, model_config, tiny_config
from train.drafts.draft_config import AdapterConfig, DraftConfig
from train.drafts.head_blueprint import HeadBlueprint, head_blueprint
from train.drafts.lm_blueprint import LMBlueprint, lm_blueprint
from train.drafts.rope import rope_of
from train.export.draft_folder import Export

TEXT = {"name": "python_stdlib"}
PADDED = 320  # rows of the target's output head; its tokenizer knows 300 tokens
ROPE = {"rope_type": "default", "rope_theta": 5e5}
LLAMA = LlamaConfig(
    vocab_size=PADDED, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=96, rms_norm_eps=1e-3, rope_parameters=ROPE,
    attention_bias=True, bos_token_id=3, eos_token_id=[4, 5], pad_token_id=7,
)  # fmt: skip


def described(config: PretrainedConfig = LLAMA) -> ModelDescription:
    return ModelDescription(ModelConfig(path="there"), config)


def lm(target: ModelDescription | None = None, **draft: Any) -> LMBlueprint:
    cfg = tiny_config(Path("out"), Path("there"), records="r", draft=draft)
    return lm_blueprint(cfg, target or described(), tiny_tokenizer())


def test_a_draft_model_speaks_every_row_of_the_targets_head() -> None:
    """The padded ones too: engines compare the two numbers. And it ends its texts as the target does."""
    config = lm().config
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id, config.pad_token_id) == (PADDED, 3, [4, 5], 7)
    assert config.rope_parameters == ROPE
    assert config.max_position_embeddings == 96


def test_a_draft_model_has_the_sizes_asked_for() -> None:
    asked = {"width": 48, "heads": 4, "kv_heads": 2, "layers": 3, "max_positions": 50, "tie_embeddings": False}
    config = lm(**asked).config
    assert (config.hidden_size, config.head_dim, config.num_hidden_layers) == (48, 12, 3)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.intermediate_size == 128  # 8/3 of 48, as a multiple of 64
    assert config.max_position_embeddings == 50
    assert config.tie_word_embeddings is False
    assert lm(width=48, heads=4).config.num_key_value_heads == 4
    assert lm(width=48, heads=4, mlp_width=72).config.intermediate_size == 72


@pytest.mark.parametrize(
    ("target_width", "draft", "sizes"),
    [
        (4096, {}, (2048, 32)),
        (512, {}, (256, 4)),  # the toy's
        (200, {}, (64, 1)),
        (100, {}, (50, 1)),
        (None, {}, (256, 4)),
        (512, {"heads": 3}, (252, 3)),
        (512, {"kv_heads": 2}, (256, 4)),
        (None, {"width": 200}, (200, 2)),  # 3 heads of 64 would leave a rest
        (64, {"width": 48, "kv_heads": 2}, (48, 2)),
    ],
)
def test_sizes_that_are_left_out_follow_the_target(
    target_width: int | None, draft: dict[str, Any], sizes: tuple[int, int]
) -> None:
    """Half its width, in heads of 64."""
    assert DraftConfig(**draft).lm_sizes(target_width) == sizes


def test_sizes_that_no_heads_fit() -> None:
    with pytest.raises(ConfigError, match="width=50 and draft.kv_heads=4 go with no number of even heads up to 4"):
        DraftConfig(width=50, kv_heads=4).lm_sizes(None)


def test_a_draft_of_a_small_target_is_smaller() -> None:
    """A width of 256 was larger than a target of 1.3M parameters."""
    target = described(LlamaConfig(vocab_size=1024, hidden_size=128, intermediate_size=384, num_hidden_layers=4))
    draft = lm(target, width=None, heads=None)
    assert draft.config.hidden_size == 64
    assert draft.weights_per_token < target.weight_counts.per_token / 4


@pytest.mark.parametrize("experiment", ["toy_draft", "toy_draft_text"])
def test_the_toy_s_draft_names_its_sizes(experiment: str) -> None:
    """Its published figures are of 1 layer of 256 channels."""
    cfg: Any = commands.built("train", [f"experiment={experiment}"])
    assert (cfg.draft.layers, cfg.draft.width, cfg.draft.heads) == (1, 256, 4)


def test_a_token_costs_layers_and_head_but_no_table() -> None:
    """Tied, the table is the head; of a head of a target the rows that it drafts; what a round shares, shared."""
    layer, norms, table = 4 * 16 * 16 + 3 * 16 * 64, 3 * 16, PADDED * 16
    for tied in (True, False):
        assert lm(tie_embeddings=tied).weights_per_token == layer + norms + table
    for family, draft in (("mtp", {}), ("eagle3", {"vocab": 40})):
        found = head(family, head=draft)
        assert found.weights_per_token == found.num_parameters + draft.get("vocab", PADDED) * 24
    medusa = head("medusa")
    assert medusa.weights_per_token == medusa.num_parameters // 3 + PADDED * 24
    counts = count_weights(LLAMA)
    assert counts.total - counts.per_token == PADDED * 24


def test_adapters_are_counted_by_themselves(tmp_path: Path) -> None:
    """Rank 2 on two square matrices of 8 in each of 3 layers; the rest is kept, and not trained."""
    model = tiny_llama(16, 8, num_layers=3)
    adapted = DraftConfig(init_from="there", lora=AdapterConfig(rank=2, targets=["q_proj", "o_proj"]))
    blueprint = LMBlueprint(adapted, model.config)
    assert blueprint.num_trained == 3 * 2 * (2 * 8 + 8 * 2)
    assert blueprint.num_parameters == model.num_parameters()
    assert replace(blueprint, draft=DraftConfig(init_from="there")).num_trained == blueprint.num_parameters


def test_without_a_target_the_tokenizer_says_which_tokens_there_are() -> None:
    cfg = tiny_config(
        Path("out"), None, data=TEXT, tokenizer={"train_entries": 300}, objective={"name": "cross_entropy"}
    )
    config = lm_blueprint(cfg, None, tiny_tokenizer(300)).config
    assert (config.vocab_size, config.eos_token_id, config.pad_token_id) == (300, 0, 1)
    assert config.max_position_embeddings == cfg.sequence_length


def test_weights_are_counted_with_the_tied_ones_once() -> None:
    """Table 320 x 16; a layer of 4 * 16 * 16 and 3 * 16 * 64; three norms."""
    layer, norms = 4 * 16 * 16 + 3 * 16 * 64, 3 * 16
    assert lm().num_parameters == PADDED * 16 + layer + norms
    assert lm(tie_embeddings=False).num_parameters == 2 * PADDED * 16 + layer + norms


def test_a_pretrained_draft_is_trained_in_full_precision(tmp_path: Path) -> None:
    """Steps smaller than bfloat16 can tell from 0 would be lost."""
    tiny_llama(16, 8, num_layers=1).bfloat16().save_pretrained(tmp_path)
    built = LMBlueprint(DraftConfig(init_from=str(tmp_path)), LLAMA).build()
    assert {weight.dtype for weight in built.module.parameters()} == {torch.float32}


def head(family: str = "eagle3", target: ModelDescription | None = None, **changes: Any) -> HeadBlueprint:
    return head_blueprint(
        head_config(Path("out"), Path("there"), family, data=TEXT, **changes), target or described(), None
    )


SHARED = {
    "vocab_size": PADDED, "hidden_size": 24, "mlp_width": 40, "heads": 4, "kv_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-3, "rope": ROPE, "max_positions": 96, "depth": 3, "draft_vocab_size": None,
}  # fmt: skip


@pytest.mark.parametrize("family", ["eagle3", "mtp", "peagle", "dspark", "dflash2", "lilicorr", "hydra", "medusa"])
def test_a_head_is_made_like_its_target(family: str) -> None:
    config = asdict(head(family).config)
    assert {name: config[name] for name in SHARED} == SHARED
    assert config["family"] == family
    own = {"eagle3": (0, 1, -1), "peagle": (0, 1, -1), "dspark": (0, 1), "dflash2": (0, 1), "lilicorr": (0, 1)}
    assert config["taps"] == own.get(family, (-1,))


def test_a_head_has_the_sizes_asked_for() -> None:
    asked = {"heads": 6, "kv_heads": 3, "mlp_width": 56, "max_positions": 33}
    config = asdict(head(draft=asked, head={"depth": 5, "vocab": 11}).config)
    assert {name: config[name] for name in asked} == asked
    assert (config["depth"], config["draft_vocab_size"]) == (5, 11)
    with pytest.raises(ConfigError, match="draft.heads=3 is not a multiple of draft.kv_heads=2"):
        head(draft={"heads": 3})


@pytest.mark.parametrize(("model_type", "has_norms"), [("llama", False), ("qwen3", True)])
def test_a_head_norms_queries_where_its_target_does(model_type: str, has_norms: bool) -> None:
    """And has biases where it has them."""
    own = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[model_type]
    config = head("mtp", described(kind(**own, attention_bias=has_norms))).config
    fields = asdict(config)
    assert (fields["qk_norm"], fields["attention_bias"]) == (has_norms, has_norms)


def test_a_head_size_that_the_target_does_not_name_is_its_share_of_the_width() -> None:
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = Qwen2Config(vocab_size=8, hidden_size=24, **shape)  # type: ignore[arg-type]
    assert getattr(config, "head_dim", None) is None
    assert head(target=described(config)).config.head_dim == 6


@pytest.mark.parametrize("name", ["gptj", "dbrx", "qwen3_moe", "gemma3", "granite"])
def test_targets_of_other_types_tell_a_head_its_sizes(name: str) -> None:
    """GPT-J and DBRX name no width of their MLPs; Qwen 3 and Gemma 3 norm queries and keys, as MTP layers then do."""
    target = described(random_config(name))
    for family in ("eagle3", "mtp", "peagle", "medusa", "dspark", "hydra"):
        config = head(family, target).config
        assert (config.hidden_size, config.heads * config.head_dim) == (32, 32)
    assert asdict(head("mtp", target).config)["qk_norm"] == (name in ("qwen3_moe", "gemma3"))


def test_an_adapter_is_refused_for_a_target_whose_passes_cannot_be_parted() -> None:
    with pytest.raises(InputError, match="cannot be parted behind layer 1: a layer hands on tuple"):
        head("exit_adapter", described(random_config("falcon")))


def test_confidence_that_is_not_trained_is_not_there() -> None:
    """It would cut drafts by chances that mean nothing."""
    for weight, wanted in ((0.0, False), (0.5, True)):
        config = head("dspark", objective={"confidence_weight": weight}).config
        assert isinstance(config, DSparkConfig)
        assert config.confidence is wanted


@pytest.mark.parametrize(
    ("asked", "layout"),
    [
        ({"markov_rank": 0}, "fill_in"),
        ({"markov_rank": 8}, "anchor"),
        ({"markov_rank": 0, "layout": "anchor"}, "anchor"),
        ({"markov_rank": 8, "layout": "fill_in"}, "fill_in"),
    ],
)
def test_a_new_block_is_laid_out_as_engines_run_it_unless_asked_otherwise(asked: dict[str, Any], layout: str) -> None:
    """DFlash and DSpark, as their files in conf/draft say; the number of draft tokens is the same."""
    blueprint = head("dspark", head=asked)
    assert isinstance(blueprint.config, DSparkConfig)
    assert (blueprint.config.layout, blueprint.config.depth, blueprint.depth) == (layout, 3, 3)
    assert blueprint.config.slots == {"anchor": 3, "fill_in": 4}[layout]


def test_a_mask_of_the_vocabulary_is_no_weight_to_train_or_to_read() -> None:
    learned, row = head("dspark"), head("dspark", head={"mask_token": PADDED - 1})
    assert learned.depth
    assert learned.num_parameters - row.num_parameters == learned.width
    assert learned.weights_per_token - row.weights_per_token == learned.width // learned.depth
    with pytest.raises(ConfigError, match=f"mask_token={PADDED}, .*has the rows 0 to {PADDED - 1}.*no text holds"):
        head("dspark", head={"mask_token": PADDED})


def test_weights_of_a_head_are_counted_without_the_targets_ends_and_without_ids(tmp_path: Path, target: Path) -> None:
    cfg = head_config(Path("out"), target, data=TEXT, head={"vocab": 40})
    blueprint = head_blueprint(cfg, describe_model(model_config(target)), None)
    assert blueprint.wants_vocab == 40
    assert blueprint.muon_lr == 2e-2  # EAGLE-3's own; other families learn at half of it
    assert replace(blueprint, config=head("hydra").config).muon_lr == 1e-2
    blueprint = blueprint.with_vocab(torch.arange(40))
    built = blueprint.build(built_head(target, "eagle3").head.ends).module
    assert isinstance(built, HeadDraft)
    assert blueprint.num_parameters == sum(weight.numel() for weight in built.parameters())
    assert built.vocab is not None
    assert built.vocab.tolist() == list(range(40))


def saved_head(folder: Path, target: Path) -> Path:
    """One that was exported in half precision, with a draft vocabulary of 40 tokens."""
    cfg = head_config(Path("out"), target, data=TEXT, head={"vocab": 40})
    known = describe_model(model_config(target))
    blueprint = head_blueprint(cfg, known, None).with_vocab(torch.arange(40))
    provenance = {"target": {"path": str(target), "fingerprint": known.fingerprint}}
    export = Export(str(target), None, torch.bfloat16, 3, "card", provenance)
    blueprint.build(built_head(target, "eagle3").head.ends).export(folder, export)
    return folder


def test_a_saved_head_goes_on_in_full_precision_with_the_tokens_it_has(tmp_path: Path, target: Path) -> None:
    folder = saved_head(tmp_path / "saved", target)
    cfg = head_config(Path("out"), target, data=TEXT, draft={"init_from": str(folder)})
    blueprint = head_blueprint(cfg, describe_model(model_config(target)), None)
    assert blueprint.wants_vocab is None
    assert blueprint.config.draft_vocab_size == 40
    built = blueprint.build(built_head(target, "eagle3").head.ends).module
    assert isinstance(built, HeadDraft)
    assert {weight.dtype for weight in built.parameters()} == {torch.float32}
    assert built.vocab is not None
    assert built.vocab.tolist() == list(range(40))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"draft": {"heads": 1}}, "draft.heads=1, and the head .* has 2"),
        ({"head": {"depth": 2}}, "draft.head.depth=2, and the head .* has 3"),
        ({"head": {"taps": [0, 1]}}, r"draft.head.taps=\[0, 1\], and the head .* has \[0, 1, -1\]"),
        ({"head": {"vocab": 50}}, "draft.head.vocab=50, and the head .* has 40"),
    ],
)
def test_a_saved_head_of_another_shape_than_asked_for(
    tmp_path: Path, target: Path, asked: dict[str, Any], message: str
) -> None:
    folder = saved_head(tmp_path / "saved", target)
    draft = asked.get("draft", {}) | {"init_from": str(folder)}
    cfg = head_config(Path("out"), target, data=TEXT, draft=draft, head=asked.get("head", {}))
    with pytest.raises(ConfigError, match=message):
        head_blueprint(cfg, describe_model(model_config(target)), None)


def target(rope: dict[str, Any] | None) -> ModelDescription:
    config = LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=2)
    config.rope_parameters = rope  # type: ignore[assignment]
    return ModelDescription(ModelConfig(path="there"), config)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {"rope_type": "longrope", "rope_theta": 1e6, "short_factor": [1.0, 1.1], "long_factor": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("theirs", "same_size", "ours"),
    [
        ({"rope_theta": 5e5}, False, {"rope_type": "default", "rope_theta": 5e5}),
        (LLAMA3, False, LLAMA3),
        (LONG, True, LONG),
        (LONG | {"partial_rotary_factor": 0.5}, True, {"rope_type": "default", "rope_theta": 1e6}),
        (LONG, False, {"rope_type": "default", "rope_theta": 1e6}),
        ({"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}, True, {"rope_theta": 5e5}),
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, False, {"rope_theta": 1e6}),
        ({}, False, {"rope_theta": 1e4}),
        (None, True, {"rope_theta": 1e4}),
    ],
)
def test_it_is_the_targets_as_far_as_it_fits(theirs: Any, same_size: bool, ours: dict[str, Any]) -> None:
    """Factors that there are one of per frequency fit heads of the same size alone."""
    described = target(theirs)
    before = repr(described.config.rope_parameters)
    assert rope_of(described, same_size) == {"rope_type": "default"} | ours
    assert repr(described.config.rope_parameters) == before, "the target's own configuration was changed"


def test_without_a_target_it_is_the_usual_one() -> None:
    assert rope_of(None) == {"rope_type": "default", "rope_theta": 1e4}


def test_a_factor_that_follows_from_the_targets_length_is_written_out() -> None:
    """The draft's own length (draft.max_positions) would give another one."""
    described = target(LONG | {"original_max_position_embeddings": 256})
    described.config.max_position_embeddings = 1024  # type: ignore[attr-defined]
    assert rope_of(described, same_head_dim=True)["factor"] == 4.0
    share = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    assert rope_of(target(share), same_head_dim=True) == share
