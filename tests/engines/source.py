"""Text of a known grammar, and a tokenizer with a token for each of its words."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 300
EOS, PAD = 0, 1
_WORDS, _CLASSES = 96, 4
_CHANCES = (0.7, 0.2, 0.07, 0.03)


class Source:
    """Of 96 words, the next one is among four, which the last word and the class of the one before it tell: so a model
    has to look back, and what misleads it about places shows."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.words = torch.randperm(VOCAB_SIZE - 2, generator=self.generator)[:_WORDS] + 2
        orders = [torch.randperm(_WORDS, generator=self.generator) for _ in range(_CLASSES * _WORDS)]
        self.next = torch.stack(orders)[:, : len(_CHANCES)].view(_CLASSES, _WORDS, len(_CHANCES))

    def draw(self, count: int, length: int) -> Tensor:
        """(count, length) token ids."""
        text = list(torch.randint(_WORDS, (2, count), generator=self.generator))
        for _ in range(length - 2):
            which = torch.multinomial(torch.tensor(_CHANCES), count, replacement=True, generator=self.generator)
            text.append(self.next[text[-2] % _CLASSES, text[-1], which])
        return self.words[torch.stack(text, 1)]


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each id. Written as Llama 2's is, with bytes for what it does not know, though it has none: llama.cpp
    converts that kind without a list of the tokenizers that it has seen."""
    words = {"<eos>": EOS, "<pad>": PAD} | {f"w{token}": token for token in range(2, VOCAB_SIZE)}
    built = Tokenizer(models.BPE(words, [], byte_fallback=True, ignore_merges=True, unk_token="<pad>"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    built.decoder = decoders.Sequence([decoders.ByteFallback()])  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=built, eos_token="<eos>", pad_token="<pad>")


def write_texts(folder: Path, source: Source, documents: int, length: int) -> Path:
    """A file for each document."""
    folder.mkdir(parents=True)
    for number, ids in enumerate(source.draw(documents, length).tolist()):
        (folder / f"{number:03d}.txt").write_text(" ".join(f"w{token}" for token in ids), encoding="utf-8")
    return folder
