"""Sequences: every token of text once, p and states of records in their places, whatever a text is scored with."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decode.common.errors import RunError
from distill.config import DistillConfig
from distill.corpora.config import DataConfig
from distill.corpora.configured import load_corpus
from distill.corpora.corpus import Corpus
from distill.objectives.target_distribution import Dense
from distill.prompts.text_sources import RecordedTexts
from distill.records.distribution_stores import Layout, StoreName
from distill.records.feature_codes import CODES, FeatureLayout
from distill.records.record_shards import Record
from distill.scorer import Scorer
from distill.sequences import record_sequences, text_sequences
from distill.target_passes import ModelPasses
from tests.distill.folders import WITH_STATES, folder_of, record
from tests.tiny import starting_tokenizer, tiny_llama, tiny_tokenizer


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


V, WIDTH = 64, 32
TEXTS = [[5, 9, 1], [7, 7, 3, 20, 11, 30, 2, 8], [40, 41, 42, 43, 44]]
MASKS = [[0, 1, 1], [0, 0, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
TARGET = tiny_llama(V, WIDTH)


def layout(*stores: StoreName, features: FeatureLayout | None = None, tail: int = 4) -> Layout:
    return Layout(list(stores), V, WIDTH, "float32", head=2, tail=tail, topk=5, features=features)


def text_of(number: int, prompt: int = 0, turn: int = 0) -> Record:
    meta = {"document": f"d{number}", "prompt": prompt, "turn": turn}
    return Record(np.array(TEXTS[number]), np.array(MASKS[number], dtype=bool), meta)


def tails(scorer: Scorer, records: Sequence[Record]) -> list[list]:
    """The token ids of each record's tail draws."""
    scorer.score(records)
    return [one.payload["head_tail.ids"][:, 2:].tolist() for one in records]


@pytest.mark.parametrize("chunk_rows", [2, 1000])
def test_p_of_a_token_is_that_of_the_text_before_it(chunk_rows: int) -> None:
    """Texts of other lengths in the batch pad it, and tokens that are not learned lie between."""
    scorer = Scorer(ModelPasses(TARGET, [], 2), layout("full"), seed=0)
    scorer.chunk_rows = chunk_rows
    records = [text_of(number, prompt=number) for number in range(3)]
    scorer.score(records)
    for one in records:
        with torch.no_grad():
            exact = TARGET(torch.from_numpy(one.ids)[None]).logits[0].double().log_softmax(-1)
        before = [place - 1 for place, learned in enumerate(one.loss_mask) if learned]
        found = torch.from_numpy(one.payload["full.log_p"]).double()
        torch.testing.assert_close(found, exact[before], atol=0.01, rtol=0.001)


def test_a_target_in_bfloat16_gives_p_in_float32() -> None:
    """Of near-equal logits in bfloat16 a distribution in bfloat16 would be off by 3 % of p."""
    model = tiny_llama(V, WIDTH).bfloat16()
    one = text_of(1)
    Scorer(ModelPasses(model, [], 1), layout("full"), seed=0).score([one])
    with torch.no_grad():
        exact = model(torch.from_numpy(one.ids)[None]).logits[0, [1, 4, 5]].double().log_softmax(-1)
    assert float((torch.from_numpy(one.payload["full.log_p"]).double() - exact).abs().max()) < 0.006


@pytest.mark.parametrize(
    ("broken", "store"),
    [*product(("states", "logits"), ("head_tail", "topk", "full")), ("states", "last_hidden")],
)
def test_predictions_that_are_not_finite_are_refused(broken: str, store: StoreName) -> None:
    """As float16 makes them of some targets. Coded, a NaN became log p = 0 of every kept token."""
    model = tiny_llama(V, WIDTH)
    scorer = Scorer(ModelPasses(model, [], 2), layout(store), seed=0)
    weights = model.model.embed_tokens if broken == "states" else model.lm_head
    weights.weight.data[7] = float("inf")  # a token of the second text alone; all have its logit
    if broken == "states":
        scorer.score([text_of(0), text_of(2, prompt=2)])
    with pytest.raises(RunError, match=r"predictions are not finite in the texts of d1, .*target\.dtype=float32"):
        scorer.score([text_of(1)])


def test_each_text_has_tail_draws_of_its_own() -> None:
    """Draws shared by two texts would make the errors of their estimates agree, and averages over texts worse."""
    same = [text_of(1, prompt, turn) for prompt, turn in ((0, 0), (1, 0), (0, 1))]
    drawn = tails(Scorer(ModelPasses(TARGET, [], 3), layout("head_tail", tail=6), seed=0), same)
    assert drawn[0] != drawn[1]
    assert drawn[0] != drawn[2]
    assert drawn[1] != drawn[2]
    heads = [one.payload["head_tail.ids"][:, :2].tolist() for one in same]
    assert heads[0] == heads[1] == heads[2]
    (other_seed,) = tails(Scorer(ModelPasses(TARGET, [], 3), layout("head_tail", tail=6), seed=1), [text_of(1)])
    assert other_seed != drawn[0]
    rows = [tuple(row) for row in drawn[0]]
    assert len(set(rows)) == len(rows) == 3


def test_tail_draws_do_not_depend_on_what_a_text_is_scored_with() -> None:
    scorer = Scorer(ModelPasses(TARGET, [], 2), layout("head_tail"), seed=0)
    together = tails(scorer, [text_of(number, prompt=number) for number in range(3)])
    assert together == [tails(scorer, [text_of(number, prompt=number)])[0] for number in range(3)]
    scorer.chunk_rows = 1
    assert together == tails(scorer, [text_of(number, prompt=number) for number in range(3)])


def test_hidden_states_are_those_of_every_token_and_of_no_padding() -> None:
    kept = FeatureLayout([1, 0], WIDTH, "bf16", 0)
    records = [text_of(number, prompt=number) for number in range(3)]
    Scorer(ModelPasses(TARGET, kept.layers, 3), layout("topk", features=kept), 0, CODES["bf16"](kept, {})).score(
        records
    )
    for one in records:
        bits = torch.from_numpy(one.features["features.0.bits"]).view(torch.bfloat16)
        embeddings = TARGET.get_input_embeddings()(torch.from_numpy(one.ids)).detach()
        assert torch.equal(bits, embeddings.bfloat16())
        assert one.feature_errors is not None
        assert one.feature_errors.shape == (len(one.ids), 2)
        assert float(one.feature_errors.max()) < 2**-16  # a rounding to 8 bits is off by at most 2 ** -9


def test_recorded_texts_are_found_by_the_numbers_of_their_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt 0 has two turns; 1, 3 and 4 had no room in the context."""
    prompts = [(0, 0), (0, 1), (2, 0), (5, 0)]
    records = [record(prompt, [1, 2, 3], [2], WITH_STATES, turn=turn) for prompt, turn in prompts]
    folder = folder_of(tmp_path, [records[:3], records[3:]], WITH_STATES)
    monkeypatch.setattr("distill.prompts.text_sources.RecordFolder", SimpleNamespace(open=lambda *_, **__: folder))
    texts = RecordedTexts(DistillConfig(responses="records", from_records=str(tmp_path)), SimpleNamespace())  # type: ignore[arg-type]
    assert texts.num_prompts == 6
    for first, last, expected in ((0, 2, prompts[:2]), (2, 5, prompts[2:3]), (3, 5, []), (5, 6, prompts[3:])):
        found = texts.write(first, last)
        assert [(one.meta["prompt"], one.meta["turn"]) for one in found] == expected
        assert not any(one.payload or one.features for one in found)
