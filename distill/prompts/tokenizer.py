"""Training a byte-level BPE tokenizer, and tokenising plain text the way every stage does it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decode.common.errors import ConfigError, InputError
from decode.models.describe import ModelDescription

EOS, PAD = "<|endoftext|>", "<|pad|>"


def train_bpe(texts: Iterable[str], entries: int, eos: str = EOS, pad: str = PAD) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `entries` tokens, `eos` and `pad` included; every text decodes back to itself.

    Raises ConfigError where `entries` does not hold the 256 bytes and the two special tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + 2
    if entries < least:
        raise ConfigError(
            f"a byte-level tokenizer of {entries} entries cannot be: it needs at least {least} for all bytes"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=entries, special_tokens=[eos, pad], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=False
    )


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, without special tokens; texts longer than the model's context do not matter here."""
    if not texts:
        return []
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]  # type: ignore[return-value]


def tokenizer_of(target: ModelDescription) -> PreTrainedTokenizerBase:
    """The target's; InputError where there is none, or one that has tokens which the target has not."""
    if target.tokenizer is None:
        raise InputError(
            f"target.path={target.path} holds no tokenizer files, and prompts are text; add them to the folder"
        )
    if len(target.tokenizer) > target.vocab_size:
        raise InputError(
            f"the tokenizer of {target.path} has {len(target.tokenizer)} entries, and the model only "
            f"{target.vocab_size}: some tokens would have no embedding. Use the tokenizer that the model was trained "
            "with"
        )
    return target.tokenizer


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of all that makes tokens of text and messages: vocabulary, merges, what is done before them, chat template."""
    is_fast = isinstance(tokenizer, PreTrainedTokenizerFast)
    whole = tokenizer.backend_tokenizer.to_str() if is_fast else json.dumps(tokenizer.get_vocab())
    return hashlib.sha256(json.dumps([whole, tokenizer.chat_template]).encode()).hexdigest()


def start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before every text: its beginning-of-sequence token, or nothing."""
    bos = tokenizer.bos_token_id
    first = list(tokenizer("a")["input_ids"])[:1]  # type: ignore[arg-type]
    return first if bos is not None and first == [bos] else []
