"""The tokens that two vocabularies share: those that stand for the same bytes, and special ones of one name or use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decode.drafters.untrained.foreign.spelling import Spelling

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class SharedTokens:
    """What is shared between a target's vocabulary and a draft's own."""

    target: Spelling
    own: Spelling

    @cached_property
    def own_of(self) -> dict[int, int]:
        """The target's token -> the draft's."""
        by_bytes: dict[bytes, int] = {}
        for token, spelled in self._ours.items():
            by_bytes.setdefault(spelled, token)
        found = {token: by_bytes[spelled] for token, spelled in self._theirs.items() if spelled in by_bytes}
        return found | self.special

    @cached_property
    def drafted(self) -> dict[int, int]:
        """The draft's token -> the one of the target that is drafted for it."""
        found: dict[int, int] = {}
        for token, own in self.own_of.items():
            found.setdefault(own, token)
        return found

    @cached_property
    def special(self) -> dict[int, int]:
        """The special ones among them: of one name, else of one use."""
        named = {name: token for token, name in self.own.special.items() if token < self.own.vocab_size}
        found = {
            token: named[name]
            for token, name in self.target.special.items()
            if name in named and token < self.target.vocab_size
        }
        for use in ("eos_token_id", "bos_token_id"):
            one, other = getattr(self.target.tokenizer, use), getattr(self.own.tokenizer, use)
            if one is not None and other is not None and one < self.target.vocab_size and other < self.own.vocab_size:
                found.setdefault(one, other)
        return found

    @cached_property
    def pairs(self) -> Tensor:
        """(2, S) int64 on the CPU: the draft's tokens, and those of the target that are drafted for them."""
        return torch.tensor([*self.drafted.items()]).T

    @cached_property
    def are_all(self) -> bool:
        """Whether neither has a token of text that the other lacks, so that texts need not be spelled anew."""
        return set(self._theirs.values()) == set(self._ours.values())

    @cached_property
    def _theirs(self) -> dict[int, bytes]:
        return token_bytes(self.target)

    @cached_property
    def _ours(self) -> dict[int, bytes]:
        return token_bytes(self.own)


def token_bytes(spelling: Spelling) -> dict[int, bytes]:
    """The bytes of each token that stands for text, those first that a tokenizer uses of several for the same: a
    fallback for single bytes comes last."""
    tokenizer = spelling.tokenizer
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[0].startswith("<0x"), pair[1]))
    kind, added = _kind(tokenizer), getattr(tokenizer, "added_tokens_decoder", {})
    return {
        token: piece.encode() if token in added else _bytes_of(piece, kind)
        for piece, token in pieces
        if token not in spelling.special and token < spelling.vocab_size
    }


def _kind(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = "" if backend is None or backend.decoder is None else str(backend.decoder)
    return next((kind for kind in ("ByteLevel", "WordPiece") if kind in decoder), "pieces")


def _bytes_of(piece: str, kind: str) -> bytes:
    if kind == "ByteLevel":
        return piece.translate(_BYTES).encode("latin-1", "ignore")
    if kind == "WordPiece":
        return piece[2:].encode() if piece.startswith("##") else f" {piece}".encode()
    single = _BYTE.fullmatch(piece) if piece.startswith("<0x") else None
    return bytes([int(single[1], 16)]) if single else piece.replace("▁", " ").encode()


def _byte_letters() -> dict[int, int]:
    """The letters from 256 on by which byte-level vocabularies write bytes that are not printable
    (Radford et al. 2019, GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {256 + at: byte for at, byte in enumerate(others)}


_BYTES = _byte_letters()
