"""Jacobi and lookahead: what rides along, what is heard of it, what is drafted from it, and that the text stays the
same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from decode import generate, load_drafter
from decode.common.errors import ConfigError
from decode.config import DecodeConfig, DrafterConfig, ModelConfig
from decode.drafters.untrained.cascade import CascadeDrafter
from decode.drafters.untrained.config import JacobiConfig
from decode.drafters.untrained.jacobi import JacobiDrafter, JacobiText, Pool, Window, seats
from decode.drafters.untrained.mixture import MixtureDrafter
from decode.drafters.untrained.ngram import NgramDrafter
from decode.loop import Loop
from decode.requests import Request
from decode.sampling.config import SamplingConfig
from decode.sampling.noise import Noise
from decode.sampling.warp import Sampling, warp
from decode.stage import run
from decode.trees.tree_plans import Shape, chain, k_ary
from tests.decode.untrained.models import draft_lm, target
from tests.tiers import by_default
from tests.tiny import save_tiny_target

pytestmark = pytest.mark.usefixtures("uncaptured")

CPU = torch.device("cpu")
LENGTHS = (4, 4, 8, 9, 13, 14, 18)
"""Of prompts with 6 tokens to come: the next one often begins where the last pass of its row was."""
PROMPTS = [torch.arange(1 + 5 * i, 1 + 5 * i + n).tolist() for i, n in enumerate(LENGTHS)]


def test_the_last_n_grams_of_a_token_are_kept() -> None:
    pool = Pool(2)
    for tail in (40, 41, 40, 42):
        pool.add([7, tail], 1)
    assert pool.found(7, 5) == [(False, (42,)), (False, (40,))]
    assert pool.found(40, 5) == []


def test_n_grams_are_found_by_their_first_token_and_for_their_place_first() -> None:
    pool = Pool(4)
    for place, tokens in enumerate([[1, 2, 3], [1, 4, 5], [2, 6, 7], [1, 8, 9]]):
        pool.add(tokens, place)
    assert pool.found(1, 1) == [(True, (4, 5)), (False, (8, 9)), (False, (2, 3))]
    assert pool.continued([1], 1, 5) == [1, 4, 5]
    assert pool.continued([9, 1], 2, 5) == [9, 1, 8, 9]
    assert pool.continued([1, 2], 0, 3) == [1, 2, 6]
    assert pool.continued([], 0, 3) == []


def test_a_column_of_a_window_is_a_way_on_written_a_token_a_pass() -> None:
    """Two levels of three, from a text of 10 tokens that grows by one, then by two."""
    text = list(range(10))
    window = Window(3, 2, text)
    young = [list(level) for level in window.levels]
    assert all(token in text for level in young for token in level)
    assert window.hear([20, 21, 22], [30, 31, 32]) == [
        (11 + column, [young[1][column], 30 + column]) for column in range(3)
    ]
    window.move([*text, 50])
    assert window.levels == [young[1], [30, 31, 32]]
    assert window.refined == [20, 21, 22]
    found = window.hear([23, 24, 25], [40, 41, 42])
    assert found == [(11 + column, [young[1][column], 30 + column, 40 + column]) for column in range(3)]
    window.move([*text, 50, 51, 52])
    assert [level[:2] for level in window.levels] == [[31, 32], [41, 42]]
    assert window.refined == [24, 25]
    assert window.tokens == [*window.levels[0], *window.levels[1]]
    (*old, new) = window.hear([0] * 3, [1, 2, 3])
    assert [one.tokens for one in old] == [[31, 41, 1], [32, 42, 2]]
    assert new == (16, [window.levels[0][2], 3]), "its first token was not the target's"


def test_new_places_hold_tokens_of_the_text_whatever_happened_before() -> None:
    """So that a text under rejection depends on its seed, not on who was decoded beside it."""
    text = list(range(100, 140))
    moved = Window(4, 2, text[:30])
    for length in (31, 35, 40):
        moved.move(text[:length])
    assert set(moved.tokens) <= set(text)
    assert moved.levels == Window(4, 2, text).levels


@pytest.mark.parametrize(("width", "levels", "num_nodes"), [(4, 1, 1), (3, 3, 4), (1, 2, 2)])
def test_who_sees_whom(width: int, levels: int, num_nodes: int) -> None:
    depths, sees = seats(width, levels, num_nodes, CPU)
    for level in range(levels):
        for column in range(width):
            own = level * width + column
            above = {column + width * higher for higher in range(1, level + 1)}
            seen = {0} | {num_nodes + one for one in {*range(column + 1), *above}}
            assert set(sees[0, own].nonzero()[:, 0].tolist()) == seen
            assert depths[0, own] == len(seen) - 1, "it stands behind all that it sees"


class Pass(NamedTuple):
    """What was heard of one."""

    begin: int
    first_level: list[int]
    first: list[int]


class Watched(JacobiText):
    """Compares what it hears with what the target says without a cache."""

    def __init__(self, prompt: list[int], drafter: WatchedDrafter) -> None:
        super().__init__(prompt, drafter.config)
        self.index, self.drafter = PROMPTS.index(prompt), drafter

    def hear(self, first: Any, last: Any) -> None:
        """As the text itself, checked."""
        levels = self.window.levels
        self.drafter.passes.append((self.index, Pass(len(self.text), list(levels[0]), list(first))))
        for column, (token, final) in enumerate(zip(first, last, strict=True)):
            before = [*self.text, *levels[0][: column + 1]]
            assert token == self._said(before)
            assert final == self._said([*before, *(level[column] for level in levels[1:])])
        super().hear(first, last)

    def _said(self, text: list[int]) -> int:
        sampling = self.drafter.sampling
        scores = warp(target()(torch.tensor([text])).logits[0, -1], sampling)
        if not sampling.is_greedy:
            noise = Noise.of(self.drafter.seed, [self.index], 64, CPU)
            scores = scores + noise.coupled(torch.tensor([[len(text)]]))[0, 0]
        return int(scores.argmax())


class WatchedDrafter(JacobiDrafter):
    """Of a call with coupled noise."""

    def __init__(self, config: JacobiConfig, sampling: Sampling, seed: int) -> None:
        super().__init__(config)
        self.sampling, self.seed = sampling, seed
        self.passes: list[tuple[int, Pass]] = []

    def begin(self, prompt: list[int]) -> JacobiText:
        """Its own."""
        return Watched(prompt, self)


CHAIN = chain(2)


def check_windows() -> None:
    """Every row hears of every one of its passes, once, what the target says to its own window, with the noise of the
    very places: of two rows at a time, and of one, which is taken over by the next request at once."""
    windows_of_a_call()
    windows_of_a_call(batch_size=1)


def windows_of_a_call(
    temperature: float = 1.0, ngram: int = 3, shape: Shape = CHAIN, new_tokens: int = 6, batch_size: int = 2
) -> list[tuple[int, Pass, list[int]]]:
    """What was heard in a call that is watched, and the text that came."""
    sampling = Sampling(temperature)
    drafter = WatchedDrafter(JacobiConfig(4, ngram), sampling, 3)
    loop = Loop(
        target(),
        drafter,
        Request(PROMPTS, new_tokens, sampling, shape=shape, batch_size=batch_size, seed=3, audit=True),
    )
    texts, stats = loop.run()
    drafted = Counter(one.row for one in stats.rounds if one.drafted)
    assert len(drafted) == len(PROMPTS)
    assert Counter(index for index, _ in drafter.passes) == {row: n - 1 for row, n in drafted.items() if n > 1}
    return [(index, one, texts[index]) for index, one in drafter.passes]


@pytest.mark.parametrize("ngram", [2, 4])
@pytest.mark.parametrize("temperature", by_default(1, [0.0, 1.0]))
def test_rows_hear_what_the_target_says_to_their_windows(temperature: float, ngram: int) -> None:
    windows_of_a_call(temperature, ngram, k_ary([2, 1]) if ngram == 4 else chain(2))


@pytest.mark.parametrize("temperature", by_default(1, [0.0, 1.0]))
def test_what_is_said_behind_right_guesses_is_right(temperature: float) -> None:
    """The fixed point of the Jacobi iteration is the text itself, at any temperature."""
    right = 0
    for _, window, text in windows_of_a_call(temperature, 2, new_tokens=30):
        for column, said in enumerate(window.first):
            place = window.begin + column + 1
            if window.first_level[: column + 1] == text[window.begin : place] and place < len(text):
                assert said == text[place]
                right += 1
    assert right > 3


def check_text() -> None:
    """The text is that of plain decoding."""
    tokens_per_pass()


def tokens_per_pass(drafter: Any = None, **settings: Any) -> float:
    """Of a call whose text is that of plain decoding."""
    ids = torch.randint(0, 64, (3, 6), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1, "seed": 3, "eos_token_id": (), "batch_size": 2}
    asked |= {"num_draft_tokens": 3, "audit": True, **settings}
    plain = generate(target(), None, ids, **asked)
    drafter = load_drafter("jacobi", target=target(), window=6) if drafter is None else drafter
    out = generate(target(), drafter, ids, **asked)
    assert torch.equal(out.sequences, plain.sequences)
    return out.stats.tau


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0}, {"tree": "dynamic", "tree_nodes": 6}, {"tree": "2x2"}, {"adaptive": True}, {"top_k": 20}],
    ids=str,
)
def test_the_text_is_that_of_plain_decoding(settings: dict[str, Any]) -> None:
    tau = tokens_per_pass(**settings)
    assert tau > 1.1 or "adaptive" in settings


def test_a_mixture_takes_the_windows_along() -> None:
    """Beside a draft with weights, which drafts now and then. Beside it nobody reads but jacobi."""
    for members in ([JacobiDrafter(), NgramDrafter()], [JacobiDrafter(), draft_lm()]):
        drafter = MixtureDrafter(members)
        assert drafter.most_passengers == 16
        assert tokens_per_pass(drafter, tree="dynamic", tree_nodes=6) > 1.1


def test_rejection_keeps_a_text_whoever_is_beside_it() -> None:
    """Candidates are a function of the row's own text, so a seed repeats it."""
    ids = torch.randint(0, 64, (3, 6), generator=torch.Generator().manual_seed(0))
    asked: dict[str, Any] = {"max_new_tokens": 20, "seed": 3, "eos_token_id": (), "verifier": "rejection"}
    drafter = load_drafter("jacobi", target=target())
    together = generate(target(), drafter, ids, **asked).sequences
    for row in range(3):
        assert torch.equal(together[row], generate(target(), drafter, ids[[row]], rows=[row], **asked).sequences[0])


def test_the_command_drafts_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save_tiny_target(tmp_path / "target"))
    draft = DrafterConfig(path="jacobi", settings={"window": 4})
    run(DecodeConfig(ModelConfig(folder), draft, SamplingConfig(max_new_tokens=8), prompt="a b a b", color="never"))
    assert "tokens per pass" in capsys.readouterr().out


JACOBI = {"members": ["jacobi", "ngram"]}


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        ("jacobi", {"window": 0}, "window=0.*at least 1"),
        ("jacobi", {"window": 600}, "window=600 and ngram=3 bring 1200 tokens.*at most 1024"),
        ("jacobi", {"ngram": 1}, "ngram=1.*at least 2"),
        ("jacobi", {"pool": 0}, "pool=0.*at least 1"),
        ("jacobi", {"guesses": 5}, "guesses"),
        ("cascade", {"draft": "d", "helper": "jacobi"}, "helper=jacobi.*ngram"),
        ("cascade", {"draft": "d", "helper": "mixture", "helper_settings": JACOBI}, "helper=mixture.*ngram"),
        ("mixture", {"members": ["mixture", "edit"], "settings": {"mixture": JACOBI}}, "jacobi in a mixture within"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(path: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DrafterConfig(path=path, settings=settings)


def test_drafters_that_would_hear_nothing_are_not_made() -> None:
    with pytest.raises(AssertionError, match="target's passes"):
        CascadeDrafter(draft_lm(), JacobiDrafter())
    with pytest.raises(AssertionError, match="one member"):
        MixtureDrafter([JacobiDrafter(), JacobiDrafter()])


@pytest.mark.parametrize(("path", "settings"), [("jacobi", {}), ("mixture", JACOBI)])
def test_strict_passes_have_no_room_for_a_window(path: str, settings: dict[str, Any]) -> None:
    """Refused before a model is loaded, and for one in memory."""
    with pytest.raises(ConfigError, match=r"decode\.strict=true.*jacobi.*strict=false"):
        DecodeConfig(ModelConfig("t"), DrafterConfig(path, settings=settings), SamplingConfig(strict=True), prompt="a")
    with pytest.raises(ConfigError, match=r"strict=True.*jacobi.*strict=false"):
        generate(target(), load_drafter(path, target=target(), **settings), torch.tensor([[1]]), strict=True)
