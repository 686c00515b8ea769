"""llama.cpp converts our folders and drafts from them as our own decoder does."""

from pathlib import Path

import pytest

from eval.modes.served.engine.metrics import Counters
from tests.engines.counters import greedy_rounds
from tests.engines.environment import llamacpp_python
from tests.engines.llamacpp import LlamaCpp, RefusedError
from tests.engines.toys import NEW_TOKENS, PROMPTS, K, Toys
from tests.train.check.folders import Folders

pytestmark = pytest.mark.engines
DRAFTS = ["lm", "eagle3-plain", "eagle3-plain-reduced", "dflash", "dflash-token", "dflash2", "dspark"]
DRAFTS += ["dspark-reduced"]
REFUSED = [
    ("eagle3-reduced", "fc_norm.0.weight"),
    ("dflash-reduced", "model.d2t"),
    ("dspark", "no d2t table found"),  # its mask is learned, and has a row of its own
    ("lm", "pre-tokenizer was not recognized"),  # it knows tokenizers by what they make of one text
]


@pytest.fixture(scope="module")
def llamacpp(tmp_path_factory: pytest.TempPathFactory) -> LlamaCpp:
    return LlamaCpp(llamacpp_python(), tmp_path_factory.mktemp("gguf"))


@pytest.mark.parametrize("draft", DRAFTS)
def test_it_drafts_alike(llamacpp: LlamaCpp, toys: Toys, draft: str) -> None:
    texts, counters = llamacpp.served(toys.exported("llama", draft, "llamacpp"))
    our_texts, ours = counted_as_there(toys, draft)
    assert texts == our_texts
    assert counters == ours
    reached = [ours.drafts, *ours.accepted]
    assert all(0 < taken < tried for tried, taken in zip(reached, reached[1:], strict=False))


@pytest.mark.parametrize(("draft", "why"), REFUSED)
def test_what_its_converter_refuses(llamacpp: LlamaCpp, tmp_path: Path, draft: str, why: str) -> None:
    folders = Folders(tmp_path)
    with pytest.raises(RefusedError, match=why):
        llamacpp.convert(folders.exported("llama", draft), folders.target("llama"))


def counted_as_there(toys: Toys, draft: str) -> tuple[list[list[int]], Counters]:
    """Greedy texts and counters of our decoder. llama.cpp drafts no more than a text still takes: of r tokens to come
    the last is never drafted, and where one is to come nothing is."""
    texts, rounds = greedy_rounds(toys.loaded("llama"), toys.drafter("llama", draft), PROMPTS, NEW_TOKENS, K)
    lengths, kept = [1] * len(texts), []
    for one in rounds:
        fits = min(K, NEW_TOKENS - lengths[one.row] - 1)
        lengths[one.row] += one.emitted
        if fits > 0:
            kept.append((fits, min(fits, one.accepted)))
    accepted = tuple(sum(taken > place for _, taken in kept) for place in range(K))
    return [text[:NEW_TOKENS] for text in texts], Counters(len(kept), sum(fits for fits, _ in kept), accepted)
