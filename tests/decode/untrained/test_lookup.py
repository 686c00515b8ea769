"""Drafts looked up in texts: matches against a search of the whole text, guesses merged into trees, edits, a datastore;
and the text stays what it is."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode import generate, load_drafter
from decode.common.errors import ConfigError, InputError
from decode.config import DecodeConfig, DrafterConfig, ModelConfig
from decode.drafters.untrained.config import NgramConfig
from decode.drafters.untrained.edit import Alignment, EditDrafter
from decode.drafters.untrained.index.automaton import DEEPEST, Cursor, Match, SuffixAutomaton
from decode.drafters.untrained.index.datastore import Datastore, manifest_of
from decode.drafters.untrained.index.several_texts import BETWEEN
from decode.drafters.untrained.ngram import NgramDrafter, NgramText
from decode.drafters.untrained.retrieval import RetrievalDrafter, likeliest, likeliest_chain
from decode.drafters.untrained.trie import merged
from decode.loop import Loop
from decode.requests import Request
from decode.sampling.config import SamplingConfig
from decode.stage import run
from decode.trees.tree_plans import chain, k_ary
from tests.tiers import by_default
from tests.tiny import save_tiny_target, tiny_llama

pytestmark = pytest.mark.usefixtures("uncaptured")

PERIOD = [5, 9, 2, 7]


def text_of(tokens: list[int], least_match: int = 1) -> NgramText:
    text = NgramDrafter(NgramConfig(least_match)).begin(tokens[:3])
    text.extend(tokens[3:])
    return text


def test_what_followed_the_longest_match_is_guessed_first() -> None:
    """[1, 2, 3] is longer than the later [2, 3], and that than the last [3]."""
    text = text_of([1, 2, 3, 40, 41, 9, 2, 3, 50, 51, 3, 60, 61, 1, 2, 3])
    assert [guess[:2] for guess in text.guesses(4, 8)] == [[40, 41], [50, 51], [60, 61]]
    assert text.guesses(4, 1) == [[40, 41, 9, 2]]


def test_of_equal_matches_the_last_one_counts() -> None:
    assert text_of([1, 2, 40, 1, 2, 50, 1, 2]).guesses(1, 8) == [[50]]


def test_a_split_keeps_its_place() -> None:
    """[1, 2] and [9, 1, 2] stood at the same places until the last token."""
    assert text_of([9, 1, 2, 40, 41, 8, 1, 2]).guesses(2, 8) == [[40, 41]]


def test_nothing_is_guessed_from_matches_that_are_too_short() -> None:
    tokens = [1, 2, 3, 40, 2, 3]
    assert text_of(tokens, least_match=2).guesses(1, 8) == [[40]]
    assert text_of(tokens, least_match=3).guesses(1, 8) == []


def test_a_text_that_repeats_itself_is_guessed_as_far_as_wanted() -> None:
    assert text_of(PERIOD * 2).guesses(10, 1) == [(PERIOD * 3)[:10]]
    assert text_of([4, 4, 4]).guesses(5, 1) == [[4] * 5]


def test_memory_is_of_ended_requests() -> None:
    """And no guess runs from one into the next."""
    drafter = NgramDrafter(NgramConfig(least_match=2, memory=100))
    for tokens in ([1, 2, 3], [3, 4, 1, 2, 7, 8]):
        drafter.end(drafter.begin(tokens))
    text = drafter.begin([9, 1, 2])
    assert text.guesses(4, 8) == [[7, 8]]
    text.extend([3])
    assert text.guesses(4, 8) == [], "what follows [1, 2, 3] is another text"
    assert NgramDrafter(NgramConfig(memory=100)).begin([1, 2]).guesses(4, 8) == [], (
        "another drafter knows nothing of it"
    )


def test_memory_forgets_what_is_long_past() -> None:
    drafter = NgramDrafter(NgramConfig(least_match=2, memory=20))
    for number in range(10):
        drafter.end(drafter.begin([number, number, *range(20, 30)]))
    known = [number for number in range(10) if drafter.begin([number, number]).guesses(3, 1)]
    assert 2 <= len(known) <= 4
    assert known[-1] == 9


@pytest.mark.parametrize(
    "settings", by_default(1, [{}, {"tree": "dynamic", "tree_nodes": 6}, {"adaptive": True}]), ids=str
)
def test_the_text_is_that_of_plain_decoding(settings: dict[str, Any]) -> None:
    """Rows that are taken over by waiting requests, twice, so that the second call finds the first one's texts."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    ids = torch.randint(0, 20, (3, 12), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {"max_new_tokens": 60, "temperature": 0.3, "seed": 3, "eos_token_id": (), "batch_size": 2}
    plain = generate(model, None, ids, **asked)
    drafter = load_drafter("ngram", target=model, memory=1000)
    first, second = (generate(model, drafter, ids, num_draft_tokens=4, audit=True, **asked, **settings) for _ in "12")
    assert torch.equal(first.sequences, plain.sequences)
    assert torch.equal(second.sequences, plain.sequences)
    # an adaptive call may have learned from the first one that lookups fail
    assert second.stats.tau > first.stats.tau + 0.1 or "adaptive" in settings, "every text was in the memory"


def test_a_text_that_was_written_before_comes_in_few_passes() -> None:
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    asked: dict[str, Any] = {"max_new_tokens": 60, "temperature": 0, "eos_token_id": ()}
    drafter = load_drafter("ngram", target=model, memory=1000)
    first, second = (generate(model, drafter, torch.tensor([[3, 4]]), num_draft_tokens=4, **asked) for _ in "12")
    assert torch.equal(first.sequences, second.sequences)
    assert second.stats.tau > 4
    assert first.stats.tau < 2


def test_each_request_has_a_text_of_its_own() -> None:
    """Also where it takes over a row: the drafter has read what stands there, and nothing else."""
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    prompts = [[11], [6, 7], [8, 9, 10], [1, 2, 3, 4, 5]]
    drafter = NgramDrafter()
    loop = Loop(model, drafter, Request(prompts, 12, batch_size=2, seed=1))
    texts, _ = loop.run()
    for row, request in enumerate(loop.rows.seated):
        read, text = drafter._text(row).index.text, texts[request]
        assert read == text[: len(read)]
        assert len(read) > len(text) - 6


def test_rounds_without_a_guess_are_plain() -> None:
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    drafter = load_drafter("ngram", target=model, least_match=50)
    out = generate(model, drafter, torch.tensor([[1, 2, 3]]), max_new_tokens=10, eos_token_id=(), seed=0)
    assert {one.drafted for one in out.stats.rounds} == {0}


def test_the_command_drafts_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(save_tiny_target(tmp_path / "target"))
    draft = DrafterConfig(path="ngram", settings={"least_match": 1})
    run(DecodeConfig(ModelConfig(target), draft, SamplingConfig(max_new_tokens=8), prompt="a b a b", color="never"))
    assert "tokens per pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("ngram", {"least_match": 0}, "least_match=0.*at least 1"),
        ("ngram", {"memory": -1}, "memory=-1 is negative"),
        ("ngram", {"memry": 5}, "Did you mean 'draft.settings.memory'"),
        ("runs/x/draft", {"memory": 5}, "without weights.*runs/x/draft"),
        (None, {"memory": 5}, "without weights"),
    ],
)
def test_settings_that_make_no_sense_are_refused(path: str | None, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DrafterConfig(path=path, settings=settings)


def longest_match(text: list[int], places: list[int], corpus: list[int]) -> int:
    """Most tokens at the end of `text` that `corpus` ends with at one of `places`."""

    def equal(place: int) -> int:
        length = 0
        while length < min(place, len(text)) and text[-1 - length] == corpus[place - 1 - length]:
            length += 1
        return length

    return max((equal(place) for place in places), default=0)


def most_recent(text: list[int], length: int, places: list[int], corpus: list[int]) -> int:
    """The last of `places` at which `corpus` ends with the last `length` tokens of `text`."""
    return max(place for place in places if corpus[max(0, place - length) : place] == text[len(text) - length :])


@pytest.mark.parametrize("num_tokens", [2, 4, 20])
def test_the_longest_and_most_recent_match_is_found(num_tokens: int) -> None:
    """After every token: the longest suffix that occurs earlier, at its last place, and every shorter match that occurs
    later, at its last place."""
    draw = random.Random(num_tokens)
    for _ in range(20):
        text: list[int] = []
        index = SuffixAutomaton()
        for _ in range(60):
            token = draw.randrange(num_tokens)
            text.append(token)
            index.extend([token])
            places = list(range(1, len(text)))
            found = list(index.matches())
            longest = longest_match(text, places, text)
            assert [one.length for one in found[:1]] == [longest][: bool(longest)]
            for one in found:
                assert one.end == most_recent(text, one.length, places, text)
            wanted = {most_recent(text, length, places, text) for length in range(1, longest + 1)}
            assert {one.end for one in found} == wanted


def test_a_cursor_finds_the_longest_match_in_other_texts() -> None:
    """Also while those grow, which splits the states it stands on."""
    draw = random.Random(0)
    for _ in range(20):
        corpus = [draw.randrange(3) for _ in range(20)]
        index, text = SuffixAutomaton(corpus), list[int]()
        cursor = Cursor(index)
        for step in range(40):
            text.append(draw.randrange(3))
            cursor.move(text[-1:])
            if step % 3 == 0:
                corpus.append(draw.randrange(3))
                index.extend(corpus[-1:])
                cursor = cursor if step % 2 else _at_end(index, text)
            (first, *_) = [*cursor.matches(), Match(0, 0)]
            before = len(corpus) - (step % 3 == 0)  # what grew since may make a longer match, which it need not know
            assert longest_match(text, list(range(1, before + 1)), corpus) <= max(first.length, 0) or step % 3 == 0
            assert corpus[first.end - first.length : first.end] == text[len(text) - first.length :]


def _at_end(index: SuffixAutomaton, text: list[int]) -> Cursor:
    cursor = Cursor(index)
    cursor.move(text)
    return cursor


def test_one_token_again_and_again_costs_no_more_than_others() -> None:
    """Such a text nests as many matches as it is long."""
    index = SuffixAutomaton([7] * 3000)
    assert list(index.matches()) == [Match(2999, 2999)]
    assert len(list(index._path())) == DEEPEST
    assert len(index._next) == 3001


PENDING = torch.tensor([[8], [9]])


def test_guesses_that_begin_alike_share_nodes() -> None:
    """And each row has a tree of its own."""
    rows = [[[1, 2, 3], [1, 4], [5]], [[1, 2, 3, 6], [7, 7]]]
    tree = merged(rows, PENDING, k_ary([2, 1, 1]))
    assert tree.tokens[:, 0].tolist() == [8, 9]
    assert [paths(tree.tokens[row].tolist(), tree.parents_of_rows()[row]) for row in range(2)] == [
        {(1,), (1, 2), (1, 2, 3), (1, 4), (5,), (0,)},  # one node was free
        {(1,), (1, 2), (1, 2, 3), (7,), (7, 7), (0,)},  # no deeper than is asked for
    ]
    assert tree.max_depth == 3


def test_the_best_guess_comes_first_and_the_others_have_what_is_left() -> None:
    tree = merged([[[1, 2, 3], [4, 5, 6]], []], PENDING, k_ary([2, 1]))
    assert tree.tokens.tolist() == [[8, 1, 2, 4, 5], [9, 0, 0, 0, 0]]
    assert tree.parents_of_rows()[0] == [-1, 0, 1, 0, 3]


def test_a_chain_is_the_first_guess() -> None:
    tree = merged([[[1, 2, 3], [4, 5, 6]], []], PENDING, chain(2))
    assert tree.is_chain
    assert tree.tokens.tolist() == [[8, 1, 2], [9, 0, 0]]


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """From pending, which is left out, to each node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


CORPUS = [1, 2, 3, 4, BETWEEN, 9, 2, 3, 5, BETWEEN, 2, 3, 4, 6, BETWEEN]


def datastore_of(tokens: list[int]) -> Datastore:
    """Sorted by brute force."""
    order = sorted(range(len(tokens)), key=lambda place: tokens[: place + 1][::-1])
    return Datastore(np.array(tokens, dtype=np.int32), np.array(order, dtype=np.int32))


def test_the_longest_match_is_found_with_all_that_follows_it() -> None:
    store = datastore_of(CORPUS)
    assert store.found([7, 1, 2, 3], 1, 64, 2) == (3, [[4]])
    length, follows = store.found([8, 2, 3], 1, 64, 2)
    assert (length, sorted(follows)) == (2, [[4], [4, 6], [5]])
    assert store.found([2, 3, 4], 1, 64, 9)[1] == [[6]], "a document's end is followed by nothing"
    assert store.found([8, 2, 3], 3, 64, 2) == (0, [])
    assert store.found([77], 1, 64, 2) == (0, [])


@pytest.mark.parametrize("seed", range(4))
def test_matches_are_those_of_a_search_of_the_corpus(seed: int) -> None:
    draw = random.Random(seed)
    tokens = [draw.choice([BETWEEN, 0, 1, 2]) for _ in range(200)]
    store = datastore_of(tokens)
    for _ in range(60):
        text = [draw.randrange(3) for _ in range(draw.randrange(1, 8))]
        longest = max(
            (n for n in range(1, len(text) + 1) for at in range(n, 201) if tokens[at - n : at] == text[-n:]), default=0
        )
        length, follows = store.found(text, 1, 1000, 3)
        assert length == longest
        places = [at for at in range(length, 201) if length and tokens[at - length : at] == text[-length:]]
        wanted = [(tokens[at : at + 3] + [BETWEEN]) for at in places]
        assert sorted(follows) == sorted(found for one in wanted if (found := one[: one.index(BETWEEN)]))


def test_the_most_frequent_continuations_are_drafted() -> None:
    seen = [[1, 2, 3], [1, 2, 4], [1, 5], [6], [1, 2, 3]]
    assert likeliest_chain(seen) == [1, 2, 3]
    assert likeliest(seen, 3) == [[1, 2, 3]]
    assert likeliest(seen, 6) == [[1, 2, 3], [6], [1, 5], [1, 2, 4]] or likeliest(seen, 6)[0] == [1, 2, 3]
    assert sum(map(len, likeliest(seen, 1))) == 1


def test_of_a_datastore_and_documents_the_longer_match_is_drafted() -> None:
    drafter = RetrievalDrafter(1, datastore_of(CORPUS), [[70, 1, 2, 3, 50, 51], [3, 60]])
    assert drafter.begin([8, 2, 3]).guesses(2, 1) == [[50, 51]], "equally long: the document's"
    assert drafter.begin([9, 2, 3]).guesses(2, 1) == [[5]], "longer in the corpus"
    text = drafter.begin([70, 1])
    text.extend([2, 3])
    assert text.guesses(2, 1) == [[50, 51]]
    assert drafter.begin([60]).guesses(2, 1) == [], "nothing follows the end of a document"


def write_datastore(folder: Path, **changes: object) -> Path:
    """A finished one of CORPUS."""
    folder.mkdir()
    store = datastore_of(CORPUS)
    store._tokens.tofile(folder / "tokens.bin")
    store._order.tofile(folder / "order.bin")
    told = {"schema": 1, "stage": "datastore", "finished": "now", "tokens": len(CORPUS), "documents": 3}
    told |= {"token_map_hash": "a" * 64}
    (folder / "manifest.json").write_text(json.dumps(told | changes))
    return folder


def test_a_datastore_is_read_as_it_was_written(tmp_path: Path) -> None:
    store = Datastore.open(write_datastore(tmp_path / "store"), "a" * 64)
    assert store.found([7, 1, 2, 3], 1, 64, 2) == (3, [[4]])


def test_unfinished_and_damaged_datastores_and_those_of_other_tokenizers_are_refused(tmp_path: Path) -> None:
    folder = write_datastore(tmp_path / "store")
    with pytest.raises(InputError, match=r"another tokenizer: token map aaaa.* bbbb"):
        Datastore.open(folder, "b" * 64)
    with (folder / "order.bin").open("ab") as file:
        file.truncate(20)
    with pytest.raises(InputError, match="order.bin has 20 bytes.*15 tokens, 60 bytes"):
        Datastore.open(folder, "a" * 64)
    (folder / "manifest.json").unlink()
    with pytest.raises(InputError, match="its build was not finished"):
        Datastore.open(folder, "a" * 64)


def test_the_corpus_of_a_datastore_is_checked_where_it_is_named(tmp_path: Path) -> None:
    data = {"name": "text", "path": "sources", "subset": None, "validation_share": 0.1, "heldout_share": 0.2}
    found = manifest_of(write_datastore(tmp_path / "new", data=data))
    assert found is not None
    assert found.data is not None
    assert (found.data.path, found.data.heldout_share) == ("sources", 0.2)
    old = manifest_of(write_datastore(tmp_path / "old"))
    assert old is not None
    assert (old.data, old.chat_template_hash) == (None, None)
    assert manifest_of(tmp_path / "none") is None
    damaged = write_datastore(tmp_path / "damaged", data=data | {"heldout_share": 2})
    for read in (manifest_of, lambda folder: Datastore.open(folder, "a" * 64)):
        with pytest.raises(InputError, match=r"data.heldout_share"):
            read(damaged)


SOURCE = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def guesses_after(written: list[int], depth: int = 3, source: list[int] = SOURCE) -> list[list[int]]:
    alignment = Alignment(source)
    for token in written:
        alignment.follow(token)
    return alignment.guesses(depth)


@pytest.mark.parametrize(
    ("written", "guesses"),
    [
        ([], [[1, 2, 3]]),
        ([1, 2], [[3, 4, 5]]),
        ([1, 2, 60], [[4, 5, 6], [3, 4, 5]]),  # replaced, or added
        ([1, 2, 60, 61], [[5, 6, 7], [3, 4, 5]]),
        ([1, 2, 60, 3, 4], [[5, 6, 7]]),  # added
        ([1, 2, 5], [[6, 7, 8], [4, 5, 6], [3, 4, 5]]),  # [3, 4] left out
        ([1, 2, 60, 4, 5], [[6, 7, 8]]),  # replaced
        (SOURCE, []),
        ([60, 61, 62, 7, 8], [[9]]),
        ([1, 2, 3, 60, 1, 2], [[3, 4, 5]]),  # back
    ],
)
def test_the_source_is_taken_up_again_behind_every_change(written: list[int], guesses: list[list[int]]) -> None:
    assert guesses_after(written) == guesses


def test_what_was_renamed_is_drafted_as_it_was_renamed() -> None:
    """One token becomes two, and two become one: both are foreseen from the second time on."""
    source = [10, 50, 11, 12, 13, 50, 14, 70, 71, 15, 16, 50, 17, 70, 71, 18]
    wanted = [10, 80, 81, 11, 12, 13, 80, 81, 14, 90, 15, 16, 80, 81, 17, 90, 18]
    assert guesses_after(wanted[:5], 12, source) == [[13, 80, 81, 14, 70, 71, 15, 16, 80, 81, 17, 70]]
    assert guesses_after(wanted[:12], 12, source) == [wanted[12:]]
    assert guesses_after(wanted[:14], 12, source) == [wanted[14:]], "the replacement itself is followed"


@pytest.mark.parametrize("seed", range(5))
def test_two_equal_tokens_settle_where_the_source_goes_on(seed: int) -> None:
    """Of a source without repetitions, whatever was changed before."""
    draw = random.Random(seed)
    source = list(range(100, 160))
    for _ in range(200):
        begin = draw.randrange(len(source) - 2)
        written = [draw.choice([*source, 1, 2, 3]) for _ in range(draw.randrange(6))] + source[begin : begin + 2]
        (first, *_) = guesses_after(written, 5, source) or [[]]
        assert first == source[begin + 2 : begin + 7] or _is_replaced(written, first)


def _is_replaced(written: list[int], guess: list[int]) -> bool:
    """What was written instead before comes again."""
    return any(token in written for token in guess)


def test_the_text_with_edits_is_that_of_plain_decoding() -> None:
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    ids = torch.randint(0, 20, (3, 12), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.5, "seed": 3, "eos_token_id": (), "batch_size": 2}
    plain = generate(model, None, ids, **asked)
    source = [token if place % 5 else 0 for place, token in enumerate(plain.sequences[0, 12:].tolist())]
    for tree in ("chain", "2x2x1"):
        out = generate(model, EditDrafter(source), ids, num_draft_tokens=3, tree=tree, audit=True, **asked)
        assert torch.equal(out.sequences, plain.sequences)
        first = [one.accepted for one in out.stats.rounds if one.row == 0]
        assert sum(first) > 15


def test_the_command_drafts_from_the_file_that_is_edited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own text given back as the source: all of it is foreseen."""
    target, old = str(save_tiny_target(tmp_path / "target")), tmp_path / "old.py"
    sampling = SamplingConfig(max_new_tokens=24, temperature=0)

    def run_with(draft: DrafterConfig, folder: str) -> None:
        run(DecodeConfig(ModelConfig(target), draft, sampling, prompt="def f():", color="never", output_dir=folder))

    run_with(DrafterConfig(), str(tmp_path / "plain"))
    printed = capsys.readouterr().out
    old.write_text(printed[: printed.rindex("\n\n")] if "\n\n" in printed else printed)
    run_with(DrafterConfig(path="edit", settings={"source": str(old)}), str(tmp_path / "edit"))
    assert "tokens per pass" in capsys.readouterr().out
    names = ("plain", "edit")
    plain, edit = ((tmp_path / name / "completion.json").read_text() for name in names)
    assert plain.split('"text"')[1].split('",')[0] == edit.split('"text"')[1].split('",')[0]


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), ("", "is empty")])
def test_a_source_that_cannot_be_edited_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, message: str
) -> None:
    source = tmp_path / "old.py"
    if content is not None:
        source.write_text(content)
    target = str(save_tiny_target(tmp_path / "target"))
    monkeypatch.setattr("decode.stage.load_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(InputError, match=message):
        run(DecodeConfig(ModelConfig(target), DrafterConfig(path="edit", settings={"source": str(source)}), prompt="a"))


def test_a_prompt_is_its_own_source() -> None:
    model = tiny_llama(dtype=torch.float64).requires_grad_(False)
    drafter = load_drafter("edit", target=model)
    out = generate(model, drafter, torch.tensor([[5, 6, 7, 8]]), max_new_tokens=4, eos_token_id=(), seed=0)
    assert out.stats.rounds[0].drafted
