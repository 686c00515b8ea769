"""What a user sets about what is kept of a target; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from decode.common.typed_config import require, require_at_least

StoreName = Literal["head_tail", "topk", "full", "last_hidden"]
FeatureCodeName = Literal["bf16", "int8", "pca"]


@dataclass
class FeatureConfig:
    """Hidden states of the target that heads draft from: kept of every token, the prompt's too."""

    layers: list[int] = field(default_factory=list)
    """Layers kept: 0 is the embeddings, i the output of layer i - 1, -1 the state after the last norm; [] is none."""
    code: FeatureCodeName = "bf16"
    """bf16: exact, 2 bytes a value; int8: 1 byte a value; pca: 1 byte for each principal component of all layers."""
    components: int | None = None
    """pca only: components kept; None is a sixth of layers * hidden size, and so a twelfth of the bytes of bf16."""
    calibration_prompts: int = 128
    """int8 and pca: the first prompts of the run, on whose texts scales and components are fitted."""

    def __post_init__(self) -> None:
        repeated = len(set(self.layers)) < len(self.layers)
        require(
            not repeated,
            f"records.features.layers={self.layers} names a layer twice. Use {list(dict.fromkeys(self.layers))}",
        )
        require(
            bool(self.layers) or self.code == "bf16",
            f"records.features.code={self.code} codes hidden states, and records.features.layers=[] keeps none; name "
            "the layers, or leave the code out",
        )
        require(
            self.components is None or self.code == "pca",
            f"records.features.components={self.components} is for code=pca, and the code is {self.code}; set "
            "records.features.code=pca, or leave the components out",
        )
        require_at_least(1, self, "records.features.", "components", "calibration_prompts")


@dataclass
class RecordsConfig:
    """What is kept of p for every learned token, and of the hidden states of all."""

    store: list[StoreName] = field(default_factory=lambda: ["head_tail"])
    """Any mix of head_tail (unbiased, tens of bytes a token), topk (biased), full (exact) and last_hidden (exact); []
    keeps the text alone."""
    head: int = 8
    """Likeliest tokens kept by head_tail."""
    tail: int = 4
    """Tokens drawn from the rest of p and kept by head_tail."""
    topk: int = 64
    """Likeliest tokens kept by topk."""
    shard_size: int = 128
    """Prompts in a shard: what a killed run loses at most, per process; with target.runtime=vllm the call in hand, 16
    prompts a row. A plan of shards above 2 GiB is refused."""
    features: FeatureConfig = field(default_factory=FeatureConfig)
    """Hidden states kept beside p."""

    def __post_init__(self) -> None:
        repeated = len(set(self.store)) < len(self.store)
        require(not repeated, f"records.store={self.store} names a store twice; name each once")
        require_at_least(1, self, "records.", "head", "tail", "topk", "shard_size")
