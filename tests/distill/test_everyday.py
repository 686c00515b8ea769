"""Chats of everyday: as many of each kind as is said, the same everywhere, no topic on both sides of a split."""

import hashlib
import json

from distill.config import DataConfig
from distill.corpora import load_corpus
from distill.corpora.corpus import Document
from distill.corpora.everyday import KINDS, everyday_chats
from distill.corpora.everyday.chats import QUOTING


def questions(documents: list[Document]) -> list[str]:
    return [document.messages[0]["content"] for document in documents if document.messages]


def test_all_kinds_of_all_topics_are_asked_and_nothing_twice() -> None:
    chats = list(everyday_chats())
    counts = {kind: sum(chat.category == kind for chat in chats) for kind in KINDS}
    assert counts == {kind: 48 * (4 if kind in QUOTING else 3) for kind in KINDS}
    assert len({chat.id for chat in chats}) == len(set(questions(chats))) == len(chats) == 1344
    assert not [text for text in questions(chats) if "{" in text or "}" in text]


def test_the_same_chats_are_made_everywhere() -> None:
    """Held-out prompts of another machine, Python or process must not have been trained on: the hash is the contract.
    Whoever changes a template or a topic changes it, and what drafts were trained on before."""
    digest = hashlib.sha256(json.dumps(questions(list(everyday_chats()))).encode()).hexdigest()
    assert digest[:16] == "77f0fc950de3dd0a"


def test_topics_are_split_whole_and_every_split_has_every_kind() -> None:
    corpus = load_corpus(DataConfig(name="everyday", validation_share=0.1, heldout_share=0.15))
    found = {split: list(corpus.documents(split)) for split in ("train", "validation", "heldout")}
    topics = [{chat.id.split("/")[0] for chat in chats} for chats in found.values()]
    assert [len(one) for one in topics] == [36, 5, 7]
    assert len(set.union(*topics)) == 48
    assert all({chat.category for chat in chats} == set(KINDS) for chats in found.values())
