"""The window of attention that a draft is trained with, against the contexts that it will meet."""

from __future__ import annotations

from decode.common.progress import get_logger
from decode.common.typed_config import require
from decode.forward.window import Window, window_of
from train.config import TrainConfig

log = get_logger("train")


def asked_window(cfg: TrainConfig, context: int) -> Window | None:
    """That of the settings, for a draft that knows so many positions; ConfigError where it knows no more than the
    window holds."""
    size = cfg.draft.window
    if size is None:
        return None
    require(
        size <= context,
        f"draft.window={size} is longer than the draft's context of {context} positions, so that no token would ever "
        "be out of it. Use a shorter window, or leave draft.window out",
    )
    if size >= cfg.sequence_length:
        log.warning(
            "draft.window=%d and sequence_length=%d: no training sequence is longer than the window, so the draft is "
            "trained as one without, and drafts with it. Train on longer sequences where texts will be longer",
            size, cfg.sequence_length,
        )  # fmt: skip
    return window_of(size, cfg.draft.sinks)
