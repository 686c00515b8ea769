"""What each engine loads, and how it is told to: a file for each engine, a line in `ENGINES`, a name in
`train/export/config.py`; layouts of its own are forms in `decode/formats/`."""

from __future__ import annotations

from train.export.engines import assisted, llamacpp, sglang, speculators, tgi, trtllm, vllm
from train.export.engines.base import Engine

_ALL = (vllm.ENGINE, sglang.ENGINE, trtllm.ENGINE, tgi.ENGINE, llamacpp.ENGINE, speculators.ENGINE, assisted.ENGINE)
ENGINES: dict[str, Engine] = {one.name: one for one in _ALL}
