"""Sequences: every token of text once, documents ended, chat masked; p and states of records in their places."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from distill.config import DataConfig
from distill.corpora import Corpus, load_corpus
from distill.objectives.target_distribution import Dense
from distill.sequences import record_sequences, text_sequences
from tests.distill.folders import WITH_STATES, folder_of, record
from tests.distill.starting import starting_tokenizer
from tests.tiny import tiny_tokenizer


def corpus_of(folder: Path, rows: list[dict]) -> Corpus:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_corpus(DataConfig(name="jsonl", path=str(path), validation_share=0.0, heldout_share=0.0))


@pytest.mark.parametrize("length", [5, 16, 1000])
def test_windows_of_a_document_join_to_its_text_and_an_end(tmp_path: Path, length: int) -> None:
    tokenizer = tiny_tokenizer()
    texts = ["def f(x):\n    return x\n" * 3, "y", "class A: pass"]
    source = text_sequences(corpus_of(tmp_path, [{"text": text} for text in texts]), tokenizer, "train", length)
    ids = np.concatenate([source[index].ids for index in range(len(source))])
    assert tokenizer.decode(ids) == "".join(text + "<eos>" for text in texts)
    assert max(source.lengths) <= length
    assert all(source[index].loss_mask.tolist()[1:] == [True] * (n - 1) for index, n in enumerate(source.lengths))
    assert not any(source[index].loss_mask[0] for index in range(len(source)))
    assert source.collate([(source[0], 0, 0)], (1, 8), "cpu") is None


def test_chat_is_learned_where_the_assistant_speaks(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    source = text_sequences(corpus_of(tmp_path, [{"messages": messages}]), tokenizer, "train", 100)
    sequence = source[0]
    assert tokenizer.decode(sequence.ids) == "[user]Hi[assistant]Hello there"
    assert str(tokenizer.decode(sequence.ids[sequence.loss_mask])).endswith("Hello there")


def test_every_window_of_text_starts_as_the_tokenizer_starts_a_text(tmp_path: Path) -> None:
    """The start token takes one of the places of a window, and the end token may be the target's own."""
    tokenizer = starting_tokenizer()
    text = "def f(x):\n    return x"
    source = text_sequences(corpus_of(tmp_path, [{"text": text}]), tokenizer, "train", 5, eos=7)
    windows = [source[index].ids.tolist() for index in range(len(source))]
    assert [window[0] for window in windows] == [tokenizer.bos_token_id] * len(windows)
    assert max(map(len, windows)) == 5
    assert sum((window[1:] for window in windows), []) == [*tokenizer(text, add_special_tokens=False)["input_ids"], 7]


def test_a_chat_is_cut_with_its_mask(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    corpus = corpus_of(tmp_path, [{"messages": messages}])
    whole = text_sequences(corpus, tokenizer, "train", 1000)[0]
    length = int(whole.loss_mask.argmax()) + 2
    cut = text_sequences(corpus, tokenizer, "train", length)[0]
    assert cut.ids.tolist() == whole.ids[:length].tolist()
    assert cut.loss_mask.tolist() == [False] * (length - 2) + [True, True]


RECORDS = [
    record(0, [4, 3, 2, 1], [1, 2, 3], WITH_STATES),
    record(3, [0, 1, 2, 3, 4], [2, 4], WITH_STATES),
    record(4, [1, 0], [], WITH_STATES),
]


def test_the_distribution_of_a_learned_token_is_found_at_the_one_before_it(tmp_path: Path) -> None:
    """Three sequences in a batch of 2 rows of 10; the second starts in column 4 of row 0, behind the first."""
    source = record_sequences(folder_of(tmp_path, [RECORDS], WITH_STATES), "train", 10)
    distribution = source.collate([(source[0], 0, 0), (source[1], 0, 4), (source[2], 1, 3)], (2, 10), "cpu")
    assert distribution is not None
    there = distribution.has(torch.arange(20)).nonzero().squeeze(-1)
    assert there.tolist() == [0, 1, 2, 5, 7]
    found = distribution.chunk(there)
    assert isinstance(found, Dense)
    assert found.log_p.argmax(-1).tolist() == [0, 1, 2, 3, 4]
    swapped = source.collate([(source[1], 0, 4), (source[0], 0, 0)], (2, 10), "cpu")
    again = None if swapped is None else swapped.chunk(there)
    assert isinstance(again, Dense)
    assert torch.equal(again.log_p, found.log_p)


def test_a_cut_record_keeps_the_distributions_of_what_is_left(tmp_path: Path) -> None:
    source = record_sequences(folder_of(tmp_path, [RECORDS], WITH_STATES), "train", 3)
    assert source.lengths.tolist() == [3, 3, 2]
    first, second = source[0], source[1]
    assert first.payload is not None
    assert second.payload is not None
    assert [rows.tolist() for rows in (first.ids, second.ids)] == [[4, 3, 2], [0, 1, 2]]
    assert [len(one.payload["full.log_p"]) for one in (first, second) if one.payload] == [2, 1]
    distribution = source.collate([(second, 1, 0)], (2, 3), "cpu")
    assert distribution is not None
    assert distribution.has(torch.arange(6)).nonzero().squeeze(-1).tolist() == [4]


def test_hidden_states_stand_at_their_tokens(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [RECORDS], WITH_STATES)
    source = record_sequences(folder, "train", 4, layers=(0, 3))
    states = source.features([(source[1], 1, 2), (source[2], 0, 0)], (2, 7), (0, 3))
    assert states is not None
    bits = states.view(torch.int16)
    assert bits[1, 2:6].tolist() == [[[300 + place, 0], [300 + place, 3]] for place in range(4)]
    assert bits[0, :2, 1].tolist() == [[400, 3], [401, 3]]
    assert not bits[1, :2].any()
    assert not bits[1, 6:].any()
    assert not bits[0, 2:].any()
