"""Exactness first: enumeration of the rejection rule, equality of coupled output, the audit of the cache."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from decode.drafters.lm import LMDraft
from tests.decode import checks
from tests.tiny import tiny_llama

VOCAB = checks.VOCAB
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
]


def qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double().eval()


def gemma3() -> Gemma3ForCausalLM:
    """Sliding window of 6 tokens: shorter than prompt and completion, so a mask by slot instead of position would
    show."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, initializer_range=0.3, sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    return Gemma3ForCausalLM(config).double().eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    return GPT2LMHeadModel(config).double().eval()


MODELS = {"llama": lambda: tiny_llama(VOCAB, dtype=torch.float64), "qwen3": qwen3, "gemma3": gemma3, "gpt2": gpt2}


def drafter(kind: str, model: torch.nn.Module) -> LMDraft | str:
    if kind == "same":  # agrees nearly always: the fate of a trained draft at its best
        return LMDraft(model)  # type: ignore[arg-type]
    if kind == "random":
        return LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64))
    return kind


@pytest.mark.parametrize("drawn", ["iid", "arbitrary"])
@pytest.mark.parametrize(("vocab_size", "k"), [(2, 3), (3, 2), (4, 1), (4, 2)])
def test_rejection_has_the_joint_law_of_the_target(vocab_size: int, k: int, drawn: str) -> None:
    checks.check_rejection_law(vocab_size, k, drawn)
    checks.check_rejection_law(vocab_size, k, drawn, zeros=True)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("kind", ["random", "same", "oracle", "tree"])
@pytest.mark.parametrize("name", MODELS)
def test_coupled_output_equals_autoregressive_output(name: str, kind: str, sampling: dict[str, float]) -> None:
    model = MODELS[name]()
    checks.check_pathwise_equality(model, drafter(kind, model), 2, max_new_tokens=20, num_draft_tokens=3, **sampling)


@pytest.mark.parametrize("batch", [1, 3, 4, 5])
@pytest.mark.parametrize("kind", ["random", "same", "oracle", "tree"])
def test_coupled_output_is_exact_in_ragged_batches(kind: str, batch: int) -> None:
    model = MODELS["llama"]()
    checks.check_pathwise_equality(model, drafter(kind, model), batch, max_new_tokens=24, num_draft_tokens=4, seed=11)


@pytest.mark.parametrize("kind", ["oracle", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_acceptance_length_rolls_back_right(kind: str, temperature: float) -> None:
    checks.check_oracle(kind, temperature=temperature)


@pytest.mark.parametrize("kind", ["oracle", "tree"])
def test_cache_holds_exactly_the_committed_tokens(kind: str) -> None:
    checks.check_cache(kind)


def test_text_does_not_depend_on_the_batch_it_came_in() -> None:
    model = MODELS["llama"]()
    ids, mask = checks.ragged_prompts(3)
    together = checks.generate(model, None, ids, mask, max_new_tokens=12, eos_token_id=())
    for row in range(3):
        alone = checks.generate(model, None, ids[row : row + 1, row:], max_new_tokens=12, rows=[row], eos_token_id=())
        assert torch.equal(alone.sequences[0, -12:], together.sequences[row, -12:])


def test_eager_attention_gets_an_additive_mask() -> None:
    """A boolean mask would be added as +1/0: greedy text then differs from transformers' own."""
    model = tiny_llama(VOCAB, attn_implementation="eager")
    ids, _ = checks.ragged_prompts(1)
    ours = checks.generate(model, None, ids, max_new_tokens=12, temperature=0, eos_token_id=())
    theirs = model.generate(ids, do_sample=False, max_new_tokens=12)  # type: ignore[operator]
    assert torch.equal(ours.sequences, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_transformers(name: str) -> None:
    model = MODELS[name]()
    ids, _ = checks.ragged_prompts(1)
    ours = checks.generate(model, None, ids, max_new_tokens=16, temperature=0, eos_token_id=())
    theirs = model.generate(ids, do_sample=False, max_new_tokens=16, eos_token_id=None)  # type: ignore[operator]
    assert torch.equal(ours.sequences, theirs)


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_tokens_outside_the_support_are_never_emitted(verifier: str) -> None:
    checks.check_filtered_tokens_never_emitted(verifier)


def test_zero_probability_is_refused_by_a_zero_uniform() -> None:
    checks.check_zero_probability_never_accepted()


def test_drafts_follow_the_law_they_are_verified_with() -> None:
    checks.check_drafts_follow_their_law()


def test_no_random_number_is_read_twice() -> None:
    checks.check_noise_is_read_once()


def test_streams_are_disjoint() -> None:
    checks.check_streams_differ()
