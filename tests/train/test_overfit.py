"""What a head has learnt by heart it drafts when it is served: labels, positions and hidden states are those of the
decoder."""

from pathlib import Path

import pytest
import torch

from decode import generate
from decode.drafters.saved_head import HEADS
from tests.tiers import by_default
from tests.tiny import save_tiny_target
from tests.train.overfit import NEW_TOKENS, PROMPT, overfit


@pytest.fixture(scope="module")
def sharp_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Far from uniform: what is drafted by guessing is rejected."""
    return save_tiny_target(tmp_path_factory.mktemp("sharp") / "model", hidden_size=64)


@pytest.mark.parametrize("family", by_default(1, HEADS))
def test_a_text_known_by_heart_is_drafted_whole(sharp_target: Path, family: str) -> None:
    known = overfit(sharp_target, family)
    written = known.text[0, PROMPT.shape[1] :].tolist()
    assert len(set(written)) > NEW_TOKENS * 0.8, "in a text that repeats itself a shifted label would be right too"
    assert known.loss < 0.1
    depth = known.head.config.depth
    out = generate(
        known.target,
        known.head,
        PROMPT,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=(),
        temperature=0.0,
        num_draft_tokens=depth,
        seed=0,
    )
    assert torch.equal(out.sequences, known.text)
    accepted = [one.accepted for one in out.stats.rounds]
    assert sum(accepted) >= depth * len(accepted) - 2, accepted  # the last round may be cut
