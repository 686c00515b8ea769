"""A fault of vLLM's CPU builds, mended in the process that imports this; it runs in another environment, so nothing of
ours is imported here."""

from typing import Any


def repeated(values: Any, ends: Any, _: int, replace_from: int = 0, replace_to: int = 0) -> Any:
    """values (B,) of rows -> (ends[-1],) of their tokens."""
    return values.where(values != replace_from, replace_to).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))


def write_temperatures() -> None:
    """Without Triton, as on a CPU, vLLM 0.32 hands a rounded copy to the C++ function that is to fill in the
    temperatures of drafted tokens, and reads the memory of the original, in which nothing was written (vLLM issue
    55005, open). With a draft at temperatures above 0 its texts were not the target's: mean log p of -4.93 where the
    entropy was 3.75, and 0.07 of first tokens accepted where 0.19 were due."""
    from vllm.triton_utils import HAS_TRITON  # pyright: ignore[reportMissingImports]
    from vllm.v1.sample import rejection_sampler  # pyright: ignore[reportMissingImports]

    if not HAS_TRITON:
        rejection_sampler.expand_batch_to_tokens = repeated
