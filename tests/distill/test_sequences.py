"""Text sequences: every token of the split once, documents ended, chat masked."""

import json
from pathlib import Path

import numpy as np
import pytest

from distill.config import DataConfig
from distill.corpora import Corpus, load_corpus
from distill.sequences import text_sequences
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
