"""Grammars: the mask of every node against a language that is written out, texts and their chances, what is refused."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast

from decode import generate, load_drafter
from decode.api import Output
from decode.common.errors import ConfigError
from decode.drafters.lm import LMDraft
from decode.sampling.config import SamplingConfig
from decode.sampling.grammar import Grammar
from decode.sampling.processors import History
from decode.trees.tree import Tree
from tests.decode import checks
from tests.tiers import by_default
from tests.tiny import tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("uncaptured")

VOCAB = 300
ANSWERS = [f"{said} {a}{b}" for said, a, b in itertools.product(("yes", "no", "note"), "0123", ("", ",4", ",5"))]
ANSWER = "(yes|no|note) [0-3](,[45])?"
SIZE = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["x", "yes"]}, "sizes": {"type": "array", "items": SIZE, "maxItems": 2}},
    "required": ["name", "sizes"],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer(VOCAB)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return tiny_llama(VOCAB, dtype=torch.float64, eos_token_id=tokenizer.eos_token_id)


def written(folder: Path, ending: str, text: str) -> str:
    file = folder / f"asked{ending}"
    file.write_text(text)
    return str(file)


def test_every_node_may_be_followed_by_what_goes_on_from_its_own_path(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Two rows whose committed texts differ; nodes that stand side by side, whole texts, and one that may not stand."""
    end = int(tokenizer.eos_token_id)  # type: ignore[arg-type]
    grammar = Grammar(written(tmp_path, ".regex", ANSWER), tokenizer, VOCAB, (end,))
    said = {text: tokenizer(text)["input_ids"] for text in ("y", "no", "n", "o", " ", "t", "1", ",", "e")}
    one = {text: ids[0] for text, ids in said.items() if len(ids) == 1}  # type: ignore[index]
    prompt = [3, 4, 5]
    rows = [[*prompt, one["n"]], prompt]
    parents = (-1, 0, 0, 1, 3, 1)
    drafted = [["n", "o", "e", " ", "1", "t"], ["y", "n", "y", "o", " ", "e"]]
    ids = torch.tensor([row + [0] * (8 - len(row)) for row in rows])
    tree = Tree(torch.tensor([[one[x] for x in row] for row in drafted]), parents, depth_bound=3)
    history = History(LogitsProcessorList([grammar]), ids, [len(row) for row in rows], [3, 3], [0, 1])
    out = history.of_tree(tree, torch.zeros(2, 6, VOCAB, dtype=torch.float64))
    for row, node in itertools.product(range(2), range(6)):
        path, at = [], node
        while at:
            path.insert(0, int(tree.tokens[row, at]))
            at = parents[at]
        text = str(tokenizer.decode(rows[row][3:] + path))
        is_begun = any(answer.startswith(text) for answer in ANSWERS)
        wanted = followers(text, tokenizer, end) if is_begun else set(range(VOCAB))
        assert set(torch.nonzero(out[row, node] == 0)[:, 0].tolist()) == wanted, (row, node, text)
    assert grammar.vocab_size == VOCAB


def followers(text: str, tokenizer: PreTrainedTokenizerFast, end: int) -> set[int]:
    """By the language itself, written out."""
    found = {end} if text in ANSWERS else set()
    for token in range(VOCAB):
        more = str(tokenizer.decode([token]))
        if token not in tokenizer.all_special_ids and any(answer.startswith(text + more) for answer in ANSWERS):
            found.add(token)
    return found


@pytest.mark.parametrize("kind", by_default(3, ["oracle", "same", "3x2x1", "tree", "dynamic", "ngram"]))
def test_the_text_is_that_of_plain_decoding_with_the_same_mask(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, kind: str
) -> None:
    tree = kind if kind in ("3x2x1", "dynamic") else None
    known = {"oracle": "oracle", "tree": "tree", "ngram": load_drafter("ngram", target=model)}
    out = checks.check_pathwise_equality(
        model, known.get(kind, LMDraft(model)), 2, max_new_tokens=24, num_draft_tokens=3, tree=tree,
        grammar=written(tmp_path, ".json", json.dumps(SCHEMA)), tokenizer=tokenizer, eos_token_id=None, audit=True,
    )  # fmt: skip
    assert kind == "ngram" or any(one.accepted for one in out.stats.rounds)


RULES: list[dict[str, Any]] = [
    {"verifier": "rejection"},
    {"verifier": "block"},
    {"verifier": "rejection", "tree": "2x2"},
    {"temperature": 0.0},
    {"top_p": 0.6, "temperature": 2.0},
]


@pytest.mark.parametrize("asked", by_default(2, RULES), ids=str)
def test_every_text_that_ends_fits_the_schema(
    tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, asked: dict[str, Any]
) -> None:
    """With refills, and drafts of another model, so that many are refused."""
    path = written(tmp_path, ".json", json.dumps(SCHEMA))
    drafter = LMDraft(tiny_llama(VOCAB, hidden_size=16, seed=5, dtype=torch.float64))
    ids = torch.randint(2, VOCAB, (8, 4), generator=torch.Generator().manual_seed(0))
    spaces = [token for token in range(VOCAB) if any(map(str.isspace, tokenizer.decode([token])))]
    asked = {"banned_words": spaces} | asked  # a random model would write hundreds
    out = generate(
        model, drafter, ids, max_new_tokens=60, grammar=path, tokenizer=tokenizer, batch_size=4, seed=3, **asked
    )
    texts = texts_that_end(out, ids.shape[1], tokenizer)
    assert len(texts) == 8
    for text in texts:
        found = json.loads(text)
        assert set(found) == {"name", "sizes"}
        assert found["name"] in ("x", "yes")
        assert all(isinstance(size, int) and 0 <= size <= 99 for size in found["sizes"])


def texts_that_end(out: Output, begin: int, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    rows = zip(out.sequences, out.lengths, out.stats.finish_reasons, strict=True)
    return [str(tokenizer.decode(row[begin : int(length) - 1])) for row, length, reason in rows if reason == "eos"]


def chances(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: list[int]) -> dict[str, float]:
    """Of every text of ANSWERS, over all ways to spell it: the model's own p at each prefix, cut to what may follow."""
    end = int(tokenizer.eos_token_id)  # type: ignore[arg-type]
    found: dict[str, float] = {}

    def walk(tokens: list[int], chance: float) -> None:
        text = str(tokenizer.decode(tokens))
        may_follow = sorted(followers(text, tokenizer, end))
        logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
        for token, p in zip(may_follow, logits[may_follow].softmax(-1).tolist(), strict=True):
            if token == end:
                found[text] = found.get(text, 0.0) + chance * p
            else:
                walk([*tokens, token], chance * p)

    with torch.inference_mode():
        walk([], 1.0)
    return found


def check_chances(tmp_path: Path, verifier: str = "rejection") -> None:
    """1,000 texts drawn with drafts of another model follow the chances that are written out."""
    tokenizer = tiny_tokenizer(VOCAB)
    model = tiny_llama(VOCAB, dtype=torch.float64, eos_token_id=tokenizer.eos_token_id, initializer_range=0.1)
    drafter = LMDraft(tiny_llama(VOCAB, hidden_size=16, seed=5, dtype=torch.float64, initializer_range=0.1))
    wanted = chances(model, tokenizer, [7, 8])
    assert sum(wanted.values()) == pytest.approx(1.0)
    out = generate(
        model, drafter, torch.tensor([[7, 8]]), num_return_sequences=1000, max_new_tokens=16, num_draft_tokens=3,
        grammar=written(tmp_path, ".regex", ANSWER), tokenizer=tokenizer, verifier=verifier, seed=0, batch_size=250,
    )  # fmt: skip
    texts = texts_that_end(out, 2, tokenizer)
    assert len(texts) == 1000, "every text ends"
    assert set(texts) <= set(ANSWERS)
    counted = Counter(texts)
    off = sum(abs(counted[text] / 1000 - chance) for text, chance in wanted.items()) / 2
    expected = sum((chance * (1 - chance) / 1000) ** 0.5 for chance in wanted.values()) * (2 / torch.pi) ** 0.5 / 2
    assert off < 1.5 * expected


@pytest.mark.parametrize("verifier", by_default(1, ["rejection", "coupled", "block"]))
def test_texts_have_the_chances_of_the_masked_target(tmp_path: Path, verifier: str) -> None:
    check_chances(tmp_path, verifier)


def check_answers() -> None:
    """Drafts that are refused at every place, in a tree: each text is an answer."""
    with TemporaryDirectory() as folder:
        tokenizer = tiny_tokenizer(VOCAB)
        model = tiny_llama(VOCAB, dtype=torch.float64, eos_token_id=tokenizer.eos_token_id)
        drafter = LMDraft(tiny_llama(VOCAB, hidden_size=16, seed=5, dtype=torch.float64))
        out = generate(
            model, drafter, torch.tensor([[7, 8]]), num_return_sequences=12, max_new_tokens=16, tree="2x1x1", seed=0,
            grammar=written(Path(folder), ".regex", ANSWER), tokenizer=tokenizer,
        )  # fmt: skip
    texts = texts_that_end(out, 2, tokenizer)
    assert len(texts) == 12
    assert set(texts) <= set(ANSWERS)


def test_every_text_is_an_answer() -> None:
    check_answers()


def test_drafts_are_masked_too(tmp_path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """A draft that is the target itself agrees with it under the mask as it does without: all of it is accepted."""
    path = written(tmp_path, ".regex", "(ab|ba|cc){30}")
    prompt = torch.tensor([[5, 6, 7]])
    asked: dict[str, Any] = {"temperature": 0.0, "num_draft_tokens": 4, "max_new_tokens": 25, "seed": 0}
    out = generate(model, LMDraft(model), prompt, grammar=path, tokenizer=tokenizer, **asked)
    assert all(one.accepted == one.drafted for one in out.stats.rounds)


BAD = {
    "not JSON": (".json", "{", "cannot be read as .json"),
    "satisfied by nothing": (".json", "false", "grammar="),
    "no rule": (".ebnf", "start ::= 'a'", "cannot be read as .ebnf"),
    "bracket": (".regex", "(a", "cannot be read as .regex"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_grammar_is_refused(tmp_path: Path, model: PreTrainedModel, name: str) -> None:
    ending, text, said = BAD[name]
    with pytest.raises(ConfigError, match=said):
        generate(
            model,
            None,
            torch.tensor([[1, 2]]),
            grammar=written(tmp_path, ending, text),
            tokenizer=tiny_tokenizer(VOCAB),
        )


@pytest.mark.parametrize(
    ("path", "said"), [("missing.json", "does not exist"), ("schema.yaml", "does not end in .json, .ebnf, .regex")]
)
def test_a_file_that_cannot_be_one_is_refused_before_a_model_is_loaded(path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        SamplingConfig(grammar=path)


def test_a_grammar_needs_a_tokenizer_and_an_end(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path, endless = written(tmp_path, ".regex", ANSWER), tiny_llama(VOCAB)
    with pytest.raises(ConfigError, match="needs tokenizer="):
        generate(endless, None, torch.tensor([[1, 2]]), grammar=path)
    mute = tiny_tokenizer(VOCAB)
    mute.eos_token = None
    with pytest.raises(ConfigError, match="neither the model nor the tokenizer names one"):
        generate(endless, None, torch.tensor([[1, 2]]), grammar=path, tokenizer=mute)


def test_a_vocabulary_that_cannot_go_on_is_told(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A model of fewer tokens than its tokenizer lacks a letter: at the first one nothing can be said, at a later one
    the text comes to a dead end."""
    vocab = tokenizer.get_vocab()
    y = vocab["y"]
    assert vocab["n"] < y
    model = tiny_llama(y, eos_token_id=tokenizer.eos_token_id)
    ids = torch.tensor([[1, 2]])
    with pytest.raises(ConfigError, match="no token may come first"):
        generate(model, None, ids, grammar=written(tmp_path, ".regex", "yes"), tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="allows no token after the 3 tokens of sequence 0"):
        generate(model, None, ids, grammar=written(tmp_path, ".regex", "ny"), tokenizer=tokenizer, max_new_tokens=8)
    whole = tiny_llama(VOCAB, eos_token_id=tokenizer.eos_token_id)
    banned: dict[str, Any] = {"tokenizer": tokenizer, "banned_words": ["y"], "max_new_tokens": 8}
    with pytest.raises(ConfigError, match="allows no token after"):
        generate(whole, None, ids, grammar=written(tmp_path, ".regex", "ny"), **banned)
