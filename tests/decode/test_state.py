"""How a verdict changes the state of the rows, against the same rule in Python, one row at a time."""

from __future__ import annotations

import torch

from decode.rounds.state import State
from decode.verify.verdict import Verdict

END_IDS = [3, 5]


def expected(ids: list[int], end: int, finished: bool, accepted: int, tokens: list[int]) -> tuple[list[int], bool]:
    """The row's tokens after the round, and whether it has ended."""
    if finished:
        return ids, True
    for token in tokens[: accepted + 1]:
        ids = [*ids, token]
        if token in END_IDS or len(ids) == end:
            return ids, True
    return ids, False


def test_rows_grow_to_the_end_of_the_text_or_of_the_room() -> None:
    """Rows of any length, with any room left, ended ones among them; every place for the end token occurs."""
    chosen = torch.Generator().manual_seed(0)

    def random(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=chosen)

    rows, depth, capacity = 400, 4, 40
    state = State.of(rows, capacity, 0.7, END_IDS, torch.device("cpu"))
    prompts = [random(6, 60, int(random(1, 20, 1))).tolist() for _ in range(rows)]
    ends = [len(prompt) + int(random(1, 8, 1)) for prompt in prompts]
    for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
        state.seat(row, prompt, end, torch.tensor(row))
    state.finished[::7] = True
    accepted, tokens = random(0, depth + 1, rows), random(0, 12, rows, depth + 1)
    after, counts = state.after(Verdict(torch.zeros_like(tokens), accepted, tokens))
    seen = set()
    for row, prompt in enumerate(prompts):
        want, ended = expected(prompt, ends[row], row % 7 == 0, int(accepted[row]), tokens[row].tolist())
        assert after.ids[row, : len(want)].tolist() == want
        assert (int(after.lengths[row]), bool(after.finished[row])) == (len(want), ended)
        assert int(counts[row]) == len(want) - len(prompt)
        seen.add((len(want) - len(prompt), ended))
    assert seen >= {(grown, ended) for grown in range(1, depth + 2) for ended in (False, True)} | {(0, True)}
    assert int(after.round_index) == 1
    assert torch.equal(state.lengths, torch.tensor([len(prompt) for prompt in prompts])), "the old state is left alone"


def test_a_text_without_end_tokens_ends_by_length_alone() -> None:
    state = State.of(1, 8, 1.0, (), torch.device("cpu"))
    state.seat(0, [1, 2], 5, torch.tensor(0))
    after, counts = state.after(Verdict(torch.zeros(1, 5).long(), torch.tensor([4]), torch.tensor([[3, 5, 3, 5, 3]])))
    assert (after.ids[0, :5].tolist(), counts.tolist(), after.finished.tolist()) == ([1, 2, 3, 5, 3], [3], [True])


def test_a_row_that_the_host_has_ended_stays_as_long_as_it_says() -> None:
    state = State.of(2, 12, 1.0, (), torch.device("cpu"))
    for row in range(2):
        state.seat(row, [1, 2, 4], 12, torch.tensor(row))
    state.stop(0, 2)
    tokens = torch.tensor([[7, 8, 9]] * 2)
    after, counts = state.after(Verdict(torch.zeros(2, 3).long(), torch.tensor([2, 2]), tokens))
    assert (after.lengths.tolist(), counts.tolist(), after.finished.tolist()) == ([2, 6], [0, 3], [True, False])
