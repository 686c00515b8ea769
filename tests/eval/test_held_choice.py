"""The recommended setting: the fastest, unless it may be behind plain decoding, and how often it is chosen again."""

import numpy as np
import pytest

from decode.common.errors import InputError
from eval.arms.base import AUTOREGRESSIVE, our_name
from eval.comparison_config import DecodersConfig
from eval.measure.held_choice import held_choice


def seconds(rng: np.random.Generator, speed: float, scatter: float, batches: int) -> list[float]:
    return (1 / (speed * np.exp(scatter * rng.standard_normal(batches)))).tolist()


def test_a_clear_winner_is_chosen_by_every_resample() -> None:
    rng = np.random.default_rng(0)
    found = held_choice(
        {name: seconds(rng, speed, 0.05, 24) for name, speed in {"plain": 1, "a": 1.5, "b": 2.0}.items()}, 0
    )
    assert (found["setting"], found["share"], found["loss"]) == ("b", 1.0, 0.0)
    assert found["over_plain"] == {"plain": 1.0, "a": 1.0, "b": 1.0}


def test_a_near_tie_is_chosen_less_often_and_costs_little() -> None:
    """The share says that the choice may not hold, the loss that this does not matter."""
    rng = np.random.default_rng(1)
    tried = {"plain": seconds(rng, 1, 0.05, 24)} | {k: seconds(rng, 1.5, 0.1, 24) for k in ("a", "b", "c")}
    found = held_choice(tried, 0)
    assert found["setting"] in ("a", "b", "c")
    assert 0.3 < found["share"] < 0.95
    assert 0 < found["loss"] < 0.05


@pytest.mark.parametrize("batches", [4, 24])
def test_the_same_scatter_holds_better_on_more_prompts(batches: int) -> None:
    def mean_share(count: int) -> float:
        shares = []
        for seed in range(12):
            rng = np.random.default_rng(seed)
            tried = {"a": seconds(rng, 1.5, 0.2, count), "b": seconds(rng, 1.6, 0.2, count)}
            shares.append(held_choice(tried, seed)["loss"])
        return float(np.mean(shares))

    assert mean_share(4 * batches) < mean_share(batches)


def test_what_may_be_behind_plain_decoding_is_not_recommended() -> None:
    """A draft that wins on the median, and is far behind on so many texts that another draw of them may show it."""
    draft = [1 / 1.1] * 7 + [1 / 0.5] * 6
    found = held_choice({"plain": [1.0] * 13, "risky": draft}, 0)
    assert np.median(1 / np.array(draft)) > 1
    assert found["setting"] == "plain"
    assert found["over_plain"]["risky"] < 0.95
    safe = held_choice({"plain": [1.0] * 13, "risky": draft, "safe": [1 / 1.05] * 13}, 0)
    assert safe["setting"] == "safe"
    assert safe["share"] == 1.0


def test_batches_that_some_setting_did_not_time_are_left_out() -> None:
    found = held_choice({"plain": [1.0, 1.0, None], "a": [0.5, 0.5, 0.1]}, 0)
    assert found["setting"] == "a"
    with pytest.raises(InputError, match=r"timed by all of plain, a.*screening_tokens"):
        held_choice({"plain": [None, 1.0], "a": [1.0, None]}, 0)


def test_plain_decoding_is_the_arm_without_a_draft() -> None:
    assert our_name("plain") == AUTOREGRESSIVE
    assert our_name("chain4") == "ours, chain4"
    with pytest.raises(Exception, match="plain"):
        DecodersConfig(arms={"plain": {}})


def test_small_batches_are_more_so_that_prompts_suffice() -> None:
    cfg = DecodersConfig(screening_batches=2, screening_prompts=16)
    assert [cfg.batches_screened(rows) for rows in (1, 4, 16)] == [16, 4, 2]
