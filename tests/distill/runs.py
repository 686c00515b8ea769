"""A tiny distill run on a corpus written by the test."""

import json
from pathlib import Path

import torch

from distill.config import DistillConfig, PromptConfig, ResponseSampling, TargetConfig
from distill.corpora.config import DataConfig
from distill.records.config import FeatureCodeName, FeatureConfig, RecordsConfig
from distill.records.record_folder import RecordFolder
from tests.tiny import save_tiny_target

ALL_STORES = ["head_tail", "topk", "full", "last_hidden"]
LAYERS = [0, 1, -1]


def write_corpus(folder: Path) -> str:
    """Forty plain-text documents; returns the path of the file."""
    path = folder / "corpus.jsonl"
    texts = [" ".join(f"def f{number}(x{n}):" for n in range(12)) for number in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def tiny_config(folder: Path, output: str = "records", **fields: object) -> DistillConfig:
    """A config of a few seconds' work on a target that is made where it is missing; `fields` replace its own."""
    target, corpus = folder / "target", folder / "corpus.jsonl"
    if not target.exists():
        save_tiny_target(target)
    path = str(corpus) if corpus.exists() else write_corpus(folder)
    base = {
        "target": TargetConfig(path=str(target)),
        "data": DataConfig(name="jsonl", path=path, validation_share=0.2, heldout_share=0.2),
        "prompts": PromptConfig(tokens=6, per_document=2, count=10, validation_count=3),
        "sampling": ResponseSampling(max_new_tokens=8),
        "batch_size": 3,
        "records": kept(),
        "output_dir": str(folder / output),
    }
    return DistillConfig(**base | fields)  # type: ignore[arg-type]


def kept(code: FeatureCodeName | None = None) -> RecordsConfig:
    """Every store, and hidden states where a code is given, fitted on 5 prompts."""
    features = FeatureConfig() if code is None else FeatureConfig(LAYERS, code, calibration_prompts=5)
    return RecordsConfig(store=list(ALL_STORES), topk=5, shard_size=4, features=features)  # type: ignore[arg-type]


def shard_files(folder: Path | str) -> dict[str, bytes]:
    """Name and content of every shard."""
    return {file.name: file.read_bytes() for file in sorted(Path(folder).glob("shards/*.safetensors"))}


def check_alike(ours: Path, theirs: Path) -> None:
    """The same texts, and the same states but for float32's rounding, which differs where passes read other rows
    together: 1e-5 of what they are, 8 bits of bfloat16."""
    one, other = RecordFolder.open(ours), RecordFolder.open(theirs)
    assert len(one) == len(other) > 0
    for a, b in ((one.read(index), other.read(index)) for index in range(len(one))):
        assert (a.ids == b.ids).all()
        assert (a.loss_mask == b.loss_mask).all()
        assert a.meta == b.meta
        assert {name: rows.shape for name, rows in a.payload.items()} == {
            n: rows.shape for n, rows in b.payload.items()
        }
        hidden = [torch.from_numpy(record.payload["last_hidden.bits"]).view(torch.float32) for record in (a, b)]
        torch.testing.assert_close(*hidden, rtol=1e-5, atol=1e-5)
        assert a.features.keys() == b.features.keys()
        for name in (name for name in a.features if name.endswith(".bits")):
            states = [torch.from_numpy(record.features[name]).view(torch.bfloat16) for record in (a, b)]
            torch.testing.assert_close(*states, rtol=2**-7, atol=1e-5)
