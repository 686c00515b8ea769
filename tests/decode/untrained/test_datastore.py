"""A datastore against a search of the whole corpus; what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from decode.common.errors import InputError
from decode.drafters.untrained.index.datastore import Datastore, manifest_of
from decode.drafters.untrained.index.several_texts import BETWEEN
from decode.drafters.untrained.retrieval import RetrievalDrafter, likeliest, likeliest_chain

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
