"""Models that drafts without training are tested on: small ones, and those over tokenizers of several kinds that write
a known text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from decode.drafters.lm import LMDraft
from decode.drafters.untrained.foreign.shared_tokens import SharedTokens
from decode.drafters.untrained.foreign.spelling import Spelling
from tests.tiny import EOS, PAD, tiny_llama, tiny_tokenizer


@cache
def target() -> Any:
    """Shared, with its captures."""
    return tiny_llama(dtype=torch.float64).requires_grad_(False)


def draft_lm(seed: int = 3) -> LMDraft:
    """Random weights of one layer."""
    return LMDraft(tiny_llama(num_layers=1, seed=seed, dtype=torch.float64).requires_grad_(False))


TEXT = "def naïve(größe):\n    return größe  # “für” 日本語 in §3, for x in range(größe)\n"
"""Words of the corpus, and characters of two and three bytes that are no tokens."""
byte_level = cache(tiny_tokenizer)


@cache
def metaspace(vocab_size: int = 420) -> PreTrainedTokenizerFast:
    """As Llama 2 and its like have it: a space is ▁, one stands before every text, and unknown letters are bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # type: ignore[assignment]
    corpus = (Path(__file__).parents[2] / "tiny_corpus.txt").read_text(encoding="utf-8")
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 256, special_tokens=[EOS, PAD], show_progress=False)
    tokenizer.train_from_iterator(corpus.split("\n"), trainer=trainer)
    written = json.loads(tokenizer.to_str())
    size = len(written["model"]["vocab"])
    written["model"]["vocab"] |= {f"<0x{byte:02X}>": size + byte for byte in range(256)}
    tokenizer = Tokenizer.from_str(json.dumps(written | {"model": written["model"] | {"byte_fallback": True}}))
    tokenizer.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


def letters(names: str, pairs: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A token a letter in this order, and behind those one for each pair of letters that is given."""
    vocab = {name: at for at, name in enumerate([*names, *pairs])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in pairs]))
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def llama(vocab_size: int, seed: int = 0) -> Any:
    """Random weights, in float64."""
    return tiny_llama(vocab_size, num_layers=1, seed=seed, dtype=torch.float64).requires_grad_(False)


def reciter(tokenizer: PreTrainedTokenizerFast, text: str = TEXT) -> GPT2LMHeadModel:
    """Writes the text, whose token it knows by its place alone, whatever stands before."""
    script = spelled(tokenizer, text)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=160, n_layer=1, n_head=2, n_positions=160, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double().eval().requires_grad_(False)
    for name, one in model.named_parameters():
        one.data.fill_(float("ln" in name and "weight" in name))
    model.transformer.wpe.weight.data += torch.eye(160, dtype=torch.float64)
    for place, token in enumerate(script[1:]):
        model.lm_head.weight.data[token, place] = 10.0
    return model


def spelled(tokenizer: PreTrainedTokenizerFast, text: str = TEXT) -> list[int]:
    """Its tokens."""
    return list(tokenizer(text)["input_ids"])  # type: ignore[arg-type]


def shared(target: PreTrainedTokenizerFast, own: PreTrainedTokenizerFast) -> SharedTokens:
    """Between models whose vocabularies are those of their tokenizers."""
    return SharedTokens(Spelling(target, len(target)), Spelling(own, len(own)))


def permuted(tokenizer: PreTrainedTokenizerFast, model: Any) -> tuple[PreTrainedTokenizerFast, Any]:
    """The same tokens under other numbers: a twin in all but the ids."""
    size = len(tokenizer)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))  # old id -> new id
    vocab = {token: int(order[number]) for token, number in tokenizer.get_vocab().items()}
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    written["model"]["vocab"] = vocab
    for one in written["added_tokens"]:
        one["id"] = vocab[one["content"]]
    other = tiny_llama(size, num_layers=1, dtype=torch.float64).requires_grad_(False)
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name][order] = model.state_dict()[name]
    other.load_state_dict(weights)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)), eos_token=EOS, pad_token=PAD
    )
    return tokenizer, other
