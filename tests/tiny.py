"""Tiny random models and tokenizers that the tests build in milliseconds; nothing here is downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    text = Path(__file__).read_text(encoding="utf-8")
    tokenizer.train_from_iterator([text], trainer=trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


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
