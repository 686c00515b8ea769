"""The speculators library (0.9.0), whose folders vLLM serves by their own name."""

from __future__ import annotations

from train.export.engines.base import FORMS, Engine

_KNOWN = "the speculators library knows EAGLE-3, DFlash and DSpark heads alone; train draft=eagle3, or use format=vllm"
ENGINE = Engine(
    "speculators",
    "speculators 0.9",
    dict.fromkeys(FORMS, _KNOWN)
    | {
        "eagle3": "not written yet",
        "dflash": "not written yet",
        "dspark": "not written yet",
    },
)
