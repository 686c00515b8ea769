"""The drafters of the matrix, by name. Those that read text are given the autoregressive one with errors in it, so that
what they draft stands here and there."""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import cache

import torch
from transformers import PreTrainedModel

from decode.drafters.base import Context, Drafter
from decode.drafters.beside.ahead import AheadDrafter
from decode.drafters.lm import LMDraft
from decode.drafters.untrained.cascade import CascadeDrafter
from decode.drafters.untrained.config import JacobiConfig, NgramConfig
from decode.drafters.untrained.early_exit import EarlyExitDrafter
from decode.drafters.untrained.edit import EditDrafter
from decode.drafters.untrained.foreign.drafter import ForeignDrafter
from decode.drafters.untrained.index.several_texts import BETWEEN
from decode.drafters.untrained.jacobi import JacobiDrafter, JacobiText
from decode.drafters.untrained.mixture import MixtureDrafter
from decode.drafters.untrained.ngram import NgramDrafter
from decode.drafters.untrained.pace import Plan
from decode.drafters.untrained.retrieval import RetrievalDrafter
from decode.trees.tree_plans import Shape, k_ary
from tests.decode.drafters import Oracle, OracleTree
from tests.decode.heads import random_head
from tests.decode.untrained.models import letters, shared
from tests.decode.untrained.test_lookup import datastore_of
from tests.tiny import MODELS, tiny_llama

VOCAB = 64
LETTERS = string.ascii_letters + string.digits + "+/"
PAIRS = [LETTERS[at : at + 2] for at in range(0, VOCAB, 8)]
TREE = k_ary([2, 2, 1])
Texts = list[list[int]]


@cache
def target(architecture: str) -> PreTrainedModel:
    """Shared by all cases, as are its captured passes."""
    return MODELS[architecture]()


@cache
def draft(architecture: str, strength: float) -> LMDraft:
    """The target's weights again, with noise on them."""
    model, generator = MODELS[architecture](), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += strength * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return LMDraft(model)


@cache
def random_draft() -> LMDraft:
    """Of an architecture and weights of its own."""
    return LMDraft(tiny_llama(num_layers=1, seed=3, dtype=torch.float64))


@cache
def foreign_draft() -> PreTrainedModel:
    """The llama's weights with noise on them, under other numbers and with tokens of its own beside them."""
    model = tiny_llama(VOCAB + len(PAIRS), dtype=torch.float64)
    weights, generator = MODELS["llama"]().state_dict(), torch.Generator().manual_seed(5)
    for name, one in model.state_dict().items():
        given = weights[name]
        if given.shape != one.shape:
            given = torch.cat([given.flip(0), one[VOCAB:]])
        one.copy_(given + 0.01 * torch.randn(one.shape, generator=generator, dtype=torch.float64))
    return model


def foreign() -> Drafter:
    """Of tokens that stand for letters, and of pairs of them."""
    return ForeignDrafter(foreign_draft(), shared(letters(LETTERS), letters(LETTERS[::-1], PAIRS)))


def with_errors(texts: Texts) -> Texts:
    """Every fourth token is another one."""
    return [[token if place % 4 else (token + 1) % VOCAB for place, token in enumerate(text)] for text in texts]


def ngram(texts: Texts) -> NgramDrafter:
    """It has read the texts."""
    drafter = NgramDrafter(NgramConfig(least_match=1, memory=1000))
    for text in with_errors(texts):
        drafter.end(drafter.begin(text))
    return drafter


def edit(texts: Texts) -> EditDrafter:
    """The texts one after another are its source."""
    return EditDrafter(sum(with_errors(texts), []))


def datastore(texts: Texts) -> RetrievalDrafter:
    """The texts are its corpus."""
    return RetrievalDrafter(1, datastore_of([token for text in with_errors(texts) for token in [*text, BETWEEN]]))


def documents(texts: Texts) -> RetrievalDrafter:
    """Every other text is one of its documents, and the others are its corpus."""
    corpus = [token for text in with_errors(texts[1::2]) for token in [*text, BETWEEN]]
    return RetrievalDrafter(1, datastore_of(corpus) if corpus else None, with_errors(texts[::2]))


class Told(JacobiDrafter):
    """Its pools begin with the n-grams of the texts."""

    def __init__(self, config: JacobiConfig, texts: Texts) -> None:
        super().__init__(config)
        self.texts = with_errors(texts)

    def begin(self, prompt: list[int]) -> JacobiText:
        """A text with all of them."""
        begun, size = super().begin(prompt), self.config.ngram
        for text in self.texts:
            for place in range(len(text) - size + 1):
                begun.pool.add(text[place : place + size], place)
        return begun


class InTurn(MixtureDrafter):
    """Its members with weights are asked in two rounds of three, each in its turn and for chains of every length,
    whatever the clock says."""

    rounds = 0

    def _chosen(self, context: Context) -> Plan:
        self.rounds += 1
        lengths = self._lengths_in(context)
        length = lengths[self.rounds // 3 % len(lengths)]
        if self.rounds % 3 == 0:
            return Plan(length)
        member = self.rounds % len(self.models)
        return Plan(length, member, self.models[member].drafter.drafted_depth(context.shape.cut(length)))


MAKERS: dict[str, Callable[[str, Texts], Drafter]] = {
    "random": lambda name, texts: random_draft(),
    "same": lambda name, texts: draft(name, 0.0),
    "tree": lambda name, texts: draft(name, 0.02),
    "ahead": lambda name, texts: AheadDrafter(draft(name, 0.02)),
    "oracle": lambda name, texts: Oracle(texts, VOCAB),
    "oracle tree": lambda name, texts: OracleTree(texts, VOCAB),
    "ngram": lambda name, texts: ngram(texts),
    "ngram tree": lambda name, texts: ngram(texts),
    "edit": lambda name, texts: edit(texts),
    "edit tree": lambda name, texts: edit(texts),
    "retrieval": lambda name, texts: documents(texts),
    "retrieval tree": lambda name, texts: datastore(texts),
    "jacobi": lambda name, texts: Told(JacobiConfig(window=6, ngram=2), texts),
    "jacobi tree": lambda name, texts: Told(JacobiConfig(window=4, ngram=4), texts),
    "early_exit": lambda name, texts: EarlyExitDrafter(target(name), 1),
    "exit_adapter": lambda name, texts: random_head("exit_adapter", target(name)),
    "cascade": lambda name, texts: CascadeDrafter(draft(name, 0.02), ngram(texts)),
    "cascade tree": lambda name, texts: CascadeDrafter(draft(name, 0.02), random_draft()),
    "foreign": lambda name, texts: foreign(),
    "mixture": lambda name, texts: InTurn([ngram(texts), edit(texts), draft(name, 0.02)]),
    "mixture tree": lambda name, texts: InTurn(
        [
            edit(texts),
            documents(texts),
            JacobiDrafter(),
            random_draft(),
            CascadeDrafter(draft(name, 0.02), ngram(texts)),
        ]
    ),
}
"""(architecture, autoregressive texts) -> the drafter."""
_FAMILIES = ("ngram", "edit", "retrieval", "jacobi", "early_exit", "exit_adapter", "cascade", "foreign", "mixture")
WITHOUT_TRAINING = [name for name in MAKERS if name.split()[0] in _FAMILIES]
SHAPES: dict[str, Shape] = {name: TREE for name in MAKERS if "tree" in name.split() and name != "oracle tree"}
"""Of drafters that are asked for trees; "oracle tree" answers a chain with a tree."""
