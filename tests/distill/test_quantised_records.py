"""Records of a quantised target hold other distributions than those of the same files as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode.common.errors import ConfigError, InputError
from decode.common.typed_config import build
from decode.config import ModelConfig, Scheme
from decode.models.load import describe_model
from distill.config import TargetConfig
from distill.records.record_folder import RecordFolder
from distill.stage import run
from tests.distill.runs import tiny_config


def recorded(folder: Path, scheme: Scheme | None) -> RecordFolder:
    target = TargetConfig(path=str(folder / "target"), quantization=scheme)
    run(tiny_config(folder, f"records of {scheme}", target=target))
    return RecordFolder.open(folder / f"records of {scheme}", describe_model(target))


def test_records_name_the_quantisation_and_fit_no_other(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    plain, rounded = recorded(tmp_path, None), recorded(tmp_path, "int8")
    assert (plain.manifest.target.quantization, rounded.manifest.target.quantization) == (None, "int8")
    assert plain.manifest.target.fingerprint == rounded.manifest.target.fingerprint
    (kind, *_), path = str(rounded.manifest.target.weights).split(":"), str(tmp_path / "target")
    assert kind == "torchao-int8"
    schemes: tuple[tuple[RecordFolder, Scheme | None, str], ...] = (
        (plain, "int8", "with quantization None, .* has int8"),
        (rounded, None, "with quantization int8, .* has None: .* rounded otherwise"),
        (rounded, "int8_dynamic", "with quantization int8, .* has int8_dynamic"),
    )
    for records, scheme, words in schemes:
        with pytest.raises(InputError, match=words):
            RecordFolder.open(records.path, describe_model(ModelConfig(path=path, quantization=scheme)))


def test_each_runtime_has_words_of_its_own() -> None:
    assert build(TargetConfig, {"path": "t", "quantization": "int4"}).quantization == "int4"
    assert build(TargetConfig, {"path": "t", "runtime": "vllm", "quantization": "fp8"}).quantization == "fp8"
    with pytest.raises(ConfigError, match="int8, int4, int8_dynamic; use one of them, or set target.runtime=vllm"):
        build(TargetConfig, {"path": "t", "quantization": "fp8"})
