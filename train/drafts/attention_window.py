"""The window of attention that a draft is trained with, against the contexts that it will meet."""

from __future__ import annotations

from decode.common.progress import get_logger
from decode.forward.window import Window, window_of
from train.config import TrainConfig
from train.drafts.draft_config import check_window

log = get_logger("train")


def asked_window(cfg: TrainConfig, context: int) -> Window | None:
    """That of the settings, for a draft that knows so many positions; ConfigError where it knows no more than the
    window holds."""
    size = cfg.draft.window
    if size is None:
        return None
    check_window(size, context, "the draft's context")
    if size >= cfg.sequence_length:
        log.warning(
            "draft.window=%d and sequence_length=%d: no training sequence is longer than the window, so the draft is "
            "trained as one without, and drafts with it. Train on longer sequences where texts will be longer",
            size, cfg.sequence_length,
        )  # fmt: skip
    return window_of(size, cfg.draft.sinks)
