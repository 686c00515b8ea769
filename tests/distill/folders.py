"""Record folders written by hand: no target, five tokens, and rows of p and states that tell where they come from."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from distill.records.distribution_stores import Layout
from distill.records.feature_codes import FeatureLayout
from distill.records.record_folder import RecordFolder
from distill.records.record_manifest import Manifest, RecordCounts, ShardSummary
from distill.records.record_shards import Record, shard_bytes, summary
from distill.records.safetensors_file import array_sums

V, WIDTH = 5, 2
FULL = Layout(["full"], V, WIDTH, "float32", head=2, tail=1, topk=2)
WITH_STATES = Layout(["full"], V, WIDTH, "float32", 2, 1, 2, FeatureLayout([3, 0], WIDTH, "bf16", 0))


def record(prompt: int, ids: Sequence[int], learned: Sequence[int], layout: Layout = FULL, **meta: object) -> Record:
    """`learned` places are learned; row r of p is all on token prompt + r, and the states of place t of layer n have
    the bits prompt * 100 + t and n."""
    mask = np.isin(np.arange(len(ids)), learned)
    sure = prompt + np.arange(len(learned))[:, None]
    rows = np.where(np.arange(V) == sure, 0.0, -20.0).astype(np.float16)
    own = {"document": f"d{prompt}", "split": "train", "turn": 0, "prompt_end": 1, "finish_reason": "length"}
    found = Record(np.array(ids), mask, own | {"prompt": prompt} | meta, {"full.log_p": rows})
    for layer in layout.features.layers if layout.features else ():
        bits = np.stack([prompt * 100 + np.arange(len(ids)), np.full(len(ids), layer)], -1)
        found.features[f"features.{layer}.bits"] = bits.astype(np.int16)
    if layout.features:
        found.feature_errors = np.zeros((len(ids), len(layout.features.layers)), np.float32)
    return found


def folder_of(path: Path, shards: Sequence[Sequence[Record]], layout: Layout = FULL) -> RecordFolder:
    """These shards, opened."""
    known = []
    for number, records in enumerate(shards):
        content = shard_bytes(records, layout)
        (path / f"{number}.safetensors").write_bytes(content)
        told = summary(content, records) | {"arrays": array_sums(BytesIO(content))}
        known.append(ShardSummary.model_construct(None, file=f"{number}.safetensors", **told))
    counts = {name: sum(getattr(shard, name) for shard in known) for name in ("tokens", "learned_tokens")}
    counted = RecordCounts.model_construct(None, **counts)
    return RecordFolder(path, Manifest.model_construct(layout=layout, shards=known, seed=7, counts=counted))
