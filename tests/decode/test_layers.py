"""Parts that heads are built of."""

import torch

from decode.drafters.layers import Rotary


def test_positions_stay_exact_in_half_precision() -> None:
    """A draft trained in fp32 and served in bfloat16 must mean the same positions."""
    rope = Rotary(64, {"rope_type": "default", "rope_theta": 10000.0}, 4096)
    x, positions = torch.randn(1, 1, 3, 64), torch.tensor([[3, 1500, 4000]])
    exact = rope(x, positions)
    for cast in (rope.bfloat16, rope.half, rope.double):
        assert torch.equal(cast()(x, positions), exact)
