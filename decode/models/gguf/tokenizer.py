"""The tokenizer of a GGUF file.

Byte-level ones are built here. transformers cuts the text of files that it does not know (SmolLM's; in 5.17 those
of Llama 3, too) as GPT-2 does, without a word: two line breaks before a digit are then two tokens where the model was
trained on one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from decode.common.errors import InputError
from decode.models.gguf.file import GgufFile

PREFIX = "tokenizer.ggml."
CONTROL, USER_DEFINED = 3, 4
NAMES = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's and Qwen 2's, which differ in the digits that they keep together."""


@dataclass(frozen=True)
class Cut:
    """How text is cut into words, over whose ends no token goes."""

    first: str | None = None
    """Pattern of what stands alone."""
    as_gpt2: bool = True
    """Whether GPT-2's pattern cuts what is left."""
    keeps_words: bool = False
    """A word that is a token is not put together by merges."""
    begins: bool = False
    """Texts begin with the token for it where the file does not say."""
    composes: bool = False
    """A letter with its accent is one character first (NFC)."""


LLAMA3 = Cut(WORDS.replace("DIGITS", r"\p{N}{1,3}"), as_gpt2=False, keeps_words=True, begins=True)
QWEN2 = WORDS.replace("DIGITS", r"\p{N}")
CUTS = {
    "gpt-2": Cut(),
    "smollm": Cut(r"\p{N}"),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": Cut(QWEN2, as_gpt2=False, composes=True),
    "deepseek-r1-qwen": Cut(QWEN2, as_gpt2=False),
}
"""By llama.cpp's name (tokenizer.ggml.pre); each is tested against what llama.cpp makes of text."""


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """That of the file, with its chat template; InputError for a kind, or a way to cut text, that is not known."""
    kind = file.metadata.get(f"{PREFIX}model")
    if kind == "llama":
        return _sentencepiece(file)
    name = str(file.metadata.get(f"{PREFIX}pre"))
    if kind != "gpt2" or name not in CUTS:
        raise InputError(
            f"{file.path} has a tokenizer of the kind {kind} that cuts text by {name} ({PREFIX}model, {PREFIX}pre), "
            f"and known are llama, and gpt2 with {', '.join(CUTS)}. Give the folder of the model in transformers "
            "format"
        )
    return _byte_level(file, CUTS[name])


def _sentencepiece(file: GgufFile) -> PreTrainedTokenizerFast:
    """As transformers has it, without what it puts behind the last row of the embedding."""
    found = PreTrainedTokenizerFast.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    rows = file.tensors["token_embd.weight"].shape[0]
    content = json.loads(found.backend_tokenizer.to_str())
    added = [one for one in content["added_tokens"] if one["id"] < rows]
    if len(added) < len(content["added_tokens"]):
        found._tokenizer = type(found.backend_tokenizer).from_str(json.dumps(content | {"added_tokens": added}))
    return found


def _byte_level(file: GgufFile, cut: Cut) -> PreTrainedTokenizerFast:
    texts = file.texts(f"{PREFIX}tokens")
    merges = [tuple(one.split(" ", 1)) for one in file.texts(f"{PREFIX}merges")]
    vocab = {text: token for token, text in enumerate(texts)}
    found: Any = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut.keeps_words))  # type: ignore[arg-type]
    patterns = [] if cut.first is None else [pre_tokenizers.Split(Regex(cut.first), "isolated")]
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [*patterns, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.as_gpt2)]
    )
    found.normalizer = normalizers.NFC() if cut.composes else None
    found.decoder = decoders.ByteLevel()
    kinds = list(zip(texts, file.metadata.get(f"{PREFIX}token_type", []), strict=False))
    found.add_special_tokens([AddedToken(text, normalized=False) for text, one in kinds if one == CONTROL])
    found.add_tokens([AddedToken(text, normalized=False) for text, one in kinds if one == USER_DEFINED])
    special = {ours: file.metadata.get(f"{PREFIX}{theirs}") for ours, theirs in NAMES.items()}
    special["pad_token"] = file.padding
    named = {name: texts[token] for name, token in special.items() if token is not None}
    found.post_processor = _ends(file, cut, named, vocab)
    template = file.metadata.get("tokenizer.chat_template")
    own = {"name_or_path": str(file.path), "clean_up_tokenization_spaces": False, "chat_template": template}
    return PreTrainedTokenizerFast(tokenizer_object=found, **named, **own)


def _ends(file: GgufFile, cut: Cut, named: dict[str, str], vocab: dict[str, int]) -> Any:
    """What puts the tokens that begin and end every text around it."""
    asked = {"bos_token": file.metadata.get(f"{PREFIX}add_bos_token", cut.begins)}
    asked["eos_token"] = file.metadata.get(f"{PREFIX}add_eos_token", False)
    first, last = ([named[name]] if asked[name] and name in named else [] for name in ("bos_token", "eos_token"))
    special = [(text, vocab[text]) for text in dict.fromkeys([*first, *last])]
    return processors.TemplateProcessing(single=[*first, "$A", *last], pair=None, special_tokens=special)
