"""The keys of vLLM's configuration; vLLM itself reads them in tests/engines/test_schedule.py."""

import pytest

from eval.modes.served.schedule.in_vllm import held_at, k_at, lengths


def test_the_longest_draft_is_named_beside_the_ranges() -> None:
    assert lengths("eagle3", [(1, 4, 4), (5, 16, 1)]) == {
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 4, 4], [5, 16, 1]],
    }


def test_one_length_for_all_needs_no_schedule_and_medusa_takes_none() -> None:
    assert lengths("medusa", [(1, 16, 3)]) == {"num_speculative_tokens": 3}
    with pytest.raises(AssertionError):
        lengths("medusa", [(1, 4, 3), (5, 16, 1)])


def test_a_server_is_held_at_a_length_as_its_schedule_would_hold_it() -> None:
    held = {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 1, 0]]}
    assert held_at("draft_model", 0, 4) == held
    assert held_at("medusa", 2, 4) == {"num_speculative_tokens": 2}


def test_behind_the_last_range_its_length_goes_on() -> None:
    schedule = [(1, 2, 4), (5, 8, 1)]
    assert [k_at(schedule, 3, size) for size in (1, 2, 3, 5, 8, 9, 200)] == [3, 3, 3, 1, 1, 1, 1]
