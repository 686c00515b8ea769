"""A streamer that keeps what it is given."""

from __future__ import annotations

import torch
from transformers.generation.streamers import BaseStreamer


class Keeper(BaseStreamer):
    """What was streamed; -1 is the end."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen += value.flatten().tolist()

    def end(self) -> None:
        self.seen.append(-1)
