"""Targets of many architectures: the text of a loop without any cache, their hidden states and ends, or a refusal."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
)

from decode import generate
from decode.common.errors import ConfigError, InputError, UserError
from decode.config import ModelConfig
from decode.drafters.lm import LMDraft
from decode.forward.runner import CAPTURE_AFTER
from decode.forward.target import CachedModel
from decode.models.compatibility import refuse_unsupported
from decode.models.describe import describe_model
from decode.models.head_targets import check_taps, strangeness
from decode.models.hidden_states import FINAL, Taps
from decode.models.output_head import ends_of, head_of
from decode.models.small import load_ends
from decode.models.structure import decoder_of
from decode.trees.tree_plans import chain, k_ary
from tests.architectures import CONFIGS, REFUSED, SIZES, random_config, random_model
from tests.decode.checks import check_pathwise_equality, ragged_prompts
from tests.tiers import by_default
from tests.tiny import MODELS, tiny_llama

NEW_TOKENS = CAPTURE_AFTER + 6  # the last passes are captured, where they can be
PROMPTS = torch.tensor([[5, 9, 2, 17, 33], [60, 7, 21, 8, 12]])


def uncached(model: PreTrainedModel, ids: Tensor) -> Tensor:
    for _ in range(NEW_TOKENS):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_that_of_a_loop_without_cache(name: str) -> None:
    """Batches of two take the attention of batches. Falcon added boolean masks there, and both our loops agreed."""
    model = random_model(name)
    want = uncached(model, PROMPTS)
    for drafter, shape in ((None, chain(0)), (LMDraft(model), chain(2)), (LMDraft(model), k_ary([2, 1]))):
        settings = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "eos_token_id": (), "tree": shape}
        assert torch.equal(generate(model, drafter, PROMPTS, **settings).sequences, want), shape  # type: ignore[arg-type]
        alone = generate(model, drafter, PROMPTS[:1], **settings).sequences  # type: ignore[arg-type]
        assert torch.equal(alone, want[:1]), shape


@pytest.mark.parametrize("name", by_default(10, CONFIGS))
def test_drawn_text_does_not_depend_on_the_draft(name: str) -> None:
    model = random_model(name)
    plain = generate(model, None, PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=(), seed=3).sequences
    drafted = generate(
        model, LMDraft(model), PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=(), seed=3, tree=k_ary([2, 2])
    )
    assert torch.equal(drafted.sequences, plain)
    assert drafted.stats.acceptance_by_position[0] > 0.9


def test_falcon_is_not_given_an_attention_that_it_does_not_look_for() -> None:
    model = random_model("falcon")
    out = generate(model, None, PROMPTS, max_new_tokens=NEW_TOKENS, temperature=0, eos_token_id=(), seed=0)
    assert torch.equal(out.sequences, uncached(model, PROMPTS))


WHY = {
    "mpt": "take no position_ids",
    "minimax": "linear_attention",
    "openai-gpt": "take no cache",
    "xlnet": "take no cache",
    "bert": "is_decoder=False",
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_before_weights_are_read(name: str, tmp_path: Path) -> None:
    random_config(name).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(InputError, match=WHY[name]):
        describe_model(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("given", "said"),
    [({"layer_types": ["chunked_attention"] * 2}, "chunked_attention"), ({"attn_temperature_tuning": True}, "scales")],
)
def test_llama_4_is_refused_where_its_attention_knows_nothing_of_positions(given: dict, said: str) -> None:
    config = random_config("llama4_text")
    for name, value in given.items():
        setattr(config, name, value)
    with pytest.raises(InputError, match=said):
        refuse_unsupported(config, "there")


def test_sdpa_is_refused_where_a_model_has_none_and_auto_takes_eager(tmp_path: Path) -> None:
    model = random_model("gpt_oss").float()
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="attn_implementation=sdpa.*gpt_oss.*attn_implementation=auto"):
        describe_model(ModelConfig(path=str(tmp_path), attn_implementation="sdpa"))
    assert LMDraft.from_pretrained(tmp_path).model.config._attn_implementation == "eager"


UNUSUAL = {
    "bloom": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
    "gpt_neo": GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
    ),
    "llama4_text": Llama4TextConfig(
        **SIZES, head_dim=8, attention_chunk_size=4, num_local_experts=2, layer_types=["chunked_attention"] * 2
    ),
    "mamba": MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_a_model_in_memory_that_cannot_be_treated_exactly_is_refused(name: str) -> None:
    ids, _ = ragged_prompts(1)
    with pytest.raises(InputError, match=name):
        generate(_random(UNUSUAL[name]), None, ids, max_new_tokens=2)


def test_a_rotation_that_depends_on_the_pass_is_used_only_where_it_does_not() -> None:
    """Beyond its original context longrope rotates whole passes anew: text would depend on the draft and the batch."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0} | factors
    special: dict[str, Any] = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "original_max_position_embeddings": 16,
    }
    model = _random(Phi3Config(**SIZES, **special, rope_parameters=rope)).double()
    for kind in ("oracle", "tree"):
        check_pathwise_equality(model, kind, 3, max_new_tokens=7, num_draft_tokens=5)
    with pytest.raises(InputError, match="context is 16"):
        generate(model, None, ragged_prompts(1)[0], max_new_tokens=8)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": 1e-40}, "temperature=1e-40 lies between 0 and 0.0001"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0"),
        ({"tree": "dynamic", "tree_nodes": 0}, "tree_nodes=0"),
        ({"confidence": True}, "adaptive=False"),
        ({"confidence": True, "adaptive": True, "tree": "2x2"}, "tree=chain"),
        ({"strict": True, "tree": "2x2"}, "strict=true"),
        ({"tree": "auto"}, "tree=auto is gone.*adaptive=true.*dynamic"),
        ({"tree": "sequoia"}, "tree=sequoia is gone.*adaptive=true.*dynamic"),
        ({"max_new_tokens": 120}, "129, but the model's context is 128"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_or_the_model_are_refused(settings: dict[str, Any], said: str) -> None:
    model = _random(LlamaConfig(**SIZES))
    with pytest.raises(UserError, match=said):
        generate(model, None, ragged_prompts(1)[0], **{"max_new_tokens": 2, **settings})


def test_attention_without_masks_is_refused() -> None:
    model = _random(LlamaConfig(**SIZES))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="flash_attention_2.*load the model with attn_implementation='sdpa'"):
        generate(model, None, ragged_prompts(1)[0], max_new_tokens=2, tree="2x2")


def _random(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_draft_tokens": 100_000}, "num_draft_tokens=100000"),
        ({"tree": "dynamic", "tree_nodes": 100_000}, "tree_nodes=100000"),
        ({"tree": "²x2"}, "not a tree"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"input_ids": torch.tensor([1, 2])}, "shape"),
        ({"input_ids": torch.zeros(0, 3, dtype=torch.long)}, "shape"),
        ({"input_ids": torch.zeros(1, 3)}, "float32"),
        ({"input_ids": torch.tensor([[1, 99]])}, "99"),
        ({"drafter": "ngram"}, "load_drafter"),
    ],
    ids=str,
)
def test_calls_without_sense_are_refused_at_once(settings: dict, words: str) -> None:
    call = {"drafter": None, "input_ids": torch.tensor([[1, 2]]), "max_new_tokens": 4} | settings
    with pytest.raises(ConfigError, match=words):
        generate(tiny_llama(), **call)


def test_a_model_that_drops_at_random_is_refused() -> None:
    model = tiny_llama(attention_dropout=0.5).train()
    with pytest.raises(ConfigError, match="train mode"):
        generate(model, None, torch.tensor([[1, 2]]), max_new_tokens=4)


POSITIONS_FIRST = ("gpt2", "opt", "xglm")
"""Whose first layer gets more than what the embedding gives."""
MAKERS = {**MODELS, **{f"random {name}": partial(random_model, name) for name in CONFIGS}}
HEADS_DRAFT_FOR = [name for name in MAKERS if not name.endswith(POSITIONS_FIRST)]


@pytest.mark.parametrize("name", HEADS_DRAFT_FOR)
def test_taps_are_the_hidden_states_that_transformers_returns(name: str) -> None:
    model = MAKERS[name]()
    ids = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    taps = Taps(model, (0, 1, FINAL))
    with torch.no_grad(), taps:
        out = model(ids, output_hidden_states=True)
    assert torch.equal(taps.stacked(), torch.stack([out.hidden_states[tap] for tap in taps.layers], 2))
    assert strangeness(model) is None
    check_taps(model.config, (0, 1, FINAL), "there")
    alone = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(head_of(model)(alone), out.logits)


OFTEN = ["llama", "qwen3", "mistral", "gemma3_text", "exaone_moe"]
PUBLISHED = "qwen2 qwen3_moe gpt_oss glm4_moe llama4_text gemma3 phi3 olmo2 smollm3 granite cohere deepseek_v3".split()


@pytest.mark.parametrize("name", [*OFTEN, *PUBLISHED])
def test_sizes_as_published_are_looked_at_in_a_small_model(name: str) -> None:
    """That of no more than two layers; nothing else of the process draws other numbers for it."""
    config, before = AutoConfig.for_model(name), torch.random.get_rng_state()
    kept = config.to_dict()
    check_taps(config, (0, 5, FINAL), "there")
    assert torch.equal(before, torch.random.get_rng_state())
    assert config.to_dict() == kept


@pytest.mark.parametrize("name", HEADS_DRAFT_FOR)
def test_passes_keep_them_slot_by_slot(name: str) -> None:
    """Ragged rows read as a prompt, then a tree whose second child stands: what is kept is what a whole pass gives."""
    model = MAKERS[name]()
    runner = CachedModel(model, 2, 64, taps=(1, FINAL))
    rows = [[5, 9, 2, 7], [1, 8]]
    ids = torch.tensor([row + [0] * (8 - len(row)) for row in rows])
    with torch.inference_mode():
        runner.prefill(ids, [0, 0], [3, 1])
        tokens = torch.tensor([[7, 3, 4, 6], [8, 3, 4, 6]])
        above = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()[None]
        starts = torch.tensor([[3], [1]])
        runner.forward(tokens, starts, torch.tensor([[0, 1, 1, 2]]), above, last_start=3)
        runner.commit(starts, torch.tensor([[0, 2, 3], [0, 2, 3]]), is_chain=False)
    assert runner.features is not None
    for row, text in enumerate([[5, 9, 2, 7, 4, 6], [1, 8, 4, 6]]):
        taps = Taps(model, (1, FINAL))
        with torch.no_grad(), taps:
            model(torch.tensor([text]))
        torch.testing.assert_close(runner.features[row, : len(text)], taps.stacked()[0], rtol=1e-5, atol=1e-6)


def test_what_is_elsewhere_shows_in_a_pass() -> None:
    scaled = tiny_llama()
    scaled.model.layers[0].register_forward_pre_hook(lambda layer, given: (given[0] * 3, *given[1:]))
    assert "first layer does not get" in str(strangeness(scaled))
    capped = tiny_llama()
    capped.register_forward_hook(halved)
    assert "its logits are not" in str(strangeness(capped))
    hidden = tiny_llama()
    hidden.model.layers = torch.nn.ModuleList([torch.nn.ModuleList(hidden.model.layers)])
    with pytest.raises(InputError, match="lists of 2 modules"):
        strangeness(hidden)


def halved(model: object, given: object, out: Any) -> Any:
    out.logits = out.logits / 2
    return out


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in HEADS_DRAFT_FOR])
def test_targets_that_add_positions_first_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="first layer does not get what its embedding gives.*Use draft=lm"):
        check_taps(MAKERS[name]().config, (FINAL,), "x")


def test_other_targets_and_other_layers_are_refused() -> None:
    with pytest.raises(InputError, match="gpt2 model.*positions or another scale come between"):
        check_taps(GPT2Config(), (FINAL,), "x")
    for wrong in ([3], [0, 0], [-2], []):
        with pytest.raises(InputError, match="which has 2 layers"):
            check_taps(LlamaConfig(num_hidden_layers=2), wrong, "x")


def test_the_last_layer_is_read_before_its_norm_too() -> None:
    model = tiny_llama(num_layers=2)
    check_taps(model.config, (2, FINAL), "x")
    taps = Taps(model, (2, FINAL))
    with torch.no_grad(), taps:
        model(torch.tensor([[5, 9, 2]]))
    raw, final = taps.each()
    torch.testing.assert_close(model.model.norm(raw), final)
    assert not torch.allclose(raw, final)


@pytest.mark.parametrize("name", HEADS_DRAFT_FOR)
def test_ends_are_read_without_the_layers_between(name: str, tmp_path: Path) -> None:
    model = MAKERS[name]()
    model.save_pretrained(tmp_path)
    ends, whole = load_ends(ModelConfig(path=str(tmp_path), device="cpu")), ends_of(model)
    ids, width = torch.tensor([[1, 5]]), model.config.get_text_config().hidden_size
    hidden = torch.randn(1, 2, width, dtype=model.dtype)
    torch.testing.assert_close(
        ends.embed(ids), whole.embed(ids), rtol=1e-7, atol=0
    )  # Gemma's scale is a rounded buffer
    assert torch.equal(ends.head(hidden), whole.head(hidden))
    assert not [key for key in ends.head.model.state_dict() if "layers." in key]


def test_ends_of_a_tied_head_are_one_matrix(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    loaded = load_ends(ModelConfig(path=str(tmp_path), device="cpu")).head.model
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight  # type: ignore[union-attr]
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 2
