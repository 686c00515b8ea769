"""Tiny random models and tokenizers that the tests build in milliseconds; nothing here is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    ExaoneMoeConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

EOS, PAD = "<eos>", "<pad>"


def tiny_llama(
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: object,
) -> LlamaForCausalLM:
    """A random Llama whose laws are far from uniform (initialised wide), in eval mode; sdpa, since eager is not exact
    in fp64."""
    fields: dict[str, object] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    } | overrides
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**fields)).to(dtype).eval()  # type: ignore[arg-type]


_GROUPED = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SMALL_WINDOW = 3  # tokens, fewer than a draft has: a mask that counts slots instead of positions would show


def _random(config: PretrainedConfig, **given: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **given).double().eval()


def _gemma3() -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    own = _GROUPED | {"num_hidden_layers": 3, "sliding_window": _SMALL_WINDOW, "layer_types": kinds}
    return _random(Gemma3TextConfig(**own))  # type: ignore[arg-type]


def exaone_moe_config(**overrides: object) -> PretrainedConfig:
    """Three layers, the last two of four experts, and an MTP layer like that of the published ones, K-EXAONE's."""
    own = _GROUPED | {"num_hidden_layers": 3, "sliding_window": _SMALL_WINDOW, "rope_parameters": _ROPE}
    own |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    own |= {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_nextn_predict_layers": 1}
    own |= {"mtp_layer_types": ["full_attention"], "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return ExaoneMoeConfig(**own | overrides)  # type: ignore[arg-type]


def _gpt2() -> PreTrainedModel:
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": None, "eos_token_id": None}
    return _random(GPT2Config(vocab_size=64, initializer_range=0.3, **shape))  # type: ignore[arg-type]


def _gpt_neox() -> PreTrainedModel:
    own = {key: value for key, value in _GROUPED.items() if key not in ("num_key_value_heads", "head_dim")}
    return _random(GPTNeoXConfig(**own))  # type: ignore[arg-type]


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: tiny_llama(dtype=torch.float64),
    "qwen3": lambda: _random(Qwen3Config(**_GROUPED)),  # type: ignore[arg-type]
    "mistral": lambda: _random(MistralConfig(**_GROUPED, sliding_window=_SMALL_WINDOW)),  # type: ignore[arg-type]
    "gemma3": _gemma3,
    "exaone_moe": lambda: _random(exaone_moe_config(), experts_implementation="eager"),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
"""Architectures of the exactness tests, in fp64: grouped heads, learned and rotary positions, windows; 64 tokens."""
IN_FLOAT64 = [name for name in MODELS if name != "exaone_moe"]
"""Models that compute in float64 where their weights are: its router rounds to float32, and 1e-7 is no fault there."""


def tiny_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `vocab_size` entries with end and padding tokens, trained on a few lines of code."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = Path(__file__).with_name("tiny_corpus.txt")  # another one would be another tokenizer in every test
    tokenizer.train_from_iterator([corpus.read_text(encoding="utf-8")], trainer=trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


def stop_within(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> str:
    """The text of the first token from the fourth on that is whole characters and comes there first."""
    texts = [str(tokenizer.decode([token])) for token in tokens]
    return next(text for at, text in enumerate(texts) if at > 2 and text.isascii() and text not in "".join(texts[:at]))


def save_tiny_target(folder: Path | str, vocab_size: int = 300, seed: int = 0, **overrides: object) -> Path:
    """A folder in transformers format holding a tiny Llama and its tokenizer; returns the folder."""
    tokenizer = tiny_tokenizer(vocab_size)
    model = tiny_llama(
        vocab_size=vocab_size,
        seed=seed,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **overrides,  # type: ignore[arg-type]
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


BOS = "<bos>"


def starting_tokenizer() -> PreTrainedTokenizerFast:
    """`tiny_tokenizer` with a beginning-of-sequence token that it puts before every text, as Llama's does."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": BOS})
    start = (BOS, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[start])
    return tokenizer
