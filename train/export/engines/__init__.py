"""What each engine loads, and how it is told to; one engine a file."""

from __future__ import annotations

from train.export.engines import assisted, llamacpp, sglang, speculators, tgi, trtllm, vllm
from train.export.engines.base import Engine

ENGINES: dict[str, Engine] = {
    one.name: one
    for one in (
        vllm.ENGINE,
        sglang.ENGINE,
        trtllm.ENGINE,
        tgi.ENGINE,
        llamacpp.ENGINE,
        speculators.ENGINE,
        assisted.ENGINE,
    )
}
