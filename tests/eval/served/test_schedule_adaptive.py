"""SGLang's adaptive parameters: where drafting stops paying, by what was accepted and how fast it was."""

import pytest

from eval.modes.served.schedule.adaptive import adaptive_config, break_even
from eval.modes.served.schedule.schedule import Choice, Ratio


def choice(batch_size: int, k: int, speedup: float) -> Choice:
    """With an interval that nobody asks for."""
    over_plain = Ratio(speedup, (speedup, speedup))
    return Choice(batch_size, k, over_plain, k, over_plain)


def test_break_even_is_where_a_round_wins_what_it_costs() -> None:
    # 3 tokens a round, 1.5 times as fast: a round takes as long as two plain steps, so one accepted token is even.
    assert break_even(2.0, 1.5) == pytest.approx(1.0)
    # No gain from what was accepted: that is the threshold itself.
    assert break_even(2.0, 1.0) == pytest.approx(2.0)


def test_drafting_ends_where_the_moving_average_falls_to_break_even() -> None:
    entries = adaptive_config([choice(1, 4, 1.75)], {4: 2.5})
    assert entries == {
        "1": {"candidate_steps": [0, 4], "up_hysteresis": 0.0, "down_hysteresis": 0.5, "ceiling_coeff": 0}
    }
    assert 0.5 + entries["1"]["down_hysteresis"] == pytest.approx(break_even(2.5, 1.75))


def test_an_entry_holds_from_its_batch_size_to_the_next_one() -> None:
    chosen = [choice(1, 2, 1.2), choice(4, 4, 1.5), choice(16, 0, 1.0)]
    entries = adaptive_config(chosen, {2: 1.0, 4: 2.0})
    assert {start: entry["candidate_steps"] for start, entry in entries.items()} == {
        "1": [0, 2],  # and 2 and 3, between, where the shorter one stands
        "4": [0, 4],
        "5": [0],  # to 16 and beyond
    }


def test_the_first_entry_holds_from_one_on() -> None:
    assert list(adaptive_config([choice(8, 2, 1.2)], {2: 1.0})) == ["1"]
