"""What engines of a large target are started with, by proxy (`vllm_proxy`): sizes, memory, quantised weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode.common.errors import ConfigError
from distill.config import RecordsConfig
from distill.stage import run
from tests.distill.engine_runs import asked, config_of, opened, proxy, quantised


def test_quantised_layers_are_the_engine_s_own_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy(tmp_path, monkeypatch)
    quantised(tmp_path / "target", packed=None)
    run(config_of(tmp_path, records=RecordsConfig(["full"])))
    assert len(opened(tmp_path)) == 13


def test_what_a_large_target_needs_reaches_both_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that reads shares out each layer: vLLM gives no states of a pipeline."""
    worker = proxy(tmp_path, monkeypatch)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    config = config_of(tmp_path)
    config.target = replace(config.target, pipeline_parallel_size=2, quantization="fp8", gpu_memory_utilization=0.8)
    run(config)
    writing, reading = (line["options"] for line in asked(worker) if "target" in line)
    both = {"quantization": "fp8", "gpu_memory_utilization": 0.8}
    assert writing == both | {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    assert reading == both | {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}


@pytest.mark.parametrize(
    ("sizes", "there", "said"),
    [
        ({"tensor_parallel_size": 3}, 0, "3 does not share out the 2 attention heads"),
        ({"pipeline_parallel_size": 4}, 0, r"1 \(times pipeline_parallel_size=4 as it reads\)"),
        ({"tensor_parallel_size": 2}, 1, "ask for 2 devices, and here are 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], there: int, said: str
) -> None:
    worker = proxy(tmp_path, monkeypatch)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: there)
    config = config_of(tmp_path)
    config.target = replace(config.target, **sizes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        run(config)
    assert not (worker / "asked.jsonl").exists()
