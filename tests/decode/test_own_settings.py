"""What a model's generation_config asks for and is not done is said, once; nothing is said where both agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from decode import generate
from decode.config import DecodeConfig, ModelConfig, SamplingConfig
from decode.custom_generate import speculative
from decode.sampling import own_settings
from decode.stage import run
from distill.config import ResponseSampling
from distill.stage import run as distill
from tests.distill.runs import tiny_config
from tests.tiny import save_tiny_target, tiny_llama

OWN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
PROMPT = torch.tensor([[5, 9, 1]])


@pytest.fixture(autouse=True)
def _of_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_settings, "_told", set())


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [one.getMessage() for one in caplog.records]
    return [line for line in lines if "generation_config" in line]


def model_with(**own: Any) -> LlamaForCausalLM:
    model = tiny_llama()
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    return model


def target_with(folder: Path, **own: Any) -> Path:
    target = save_tiny_target(folder / "target")
    file = target / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    return target


def test_generate_says_once_what_it_does_not_do(caplog: pytest.LogCaptureFixture) -> None:
    model = model_with(**OWN)
    for _ in range(2):
        generate(model, None, PROMPT, max_new_tokens=2)
    (line,) = said(caplog)
    assert "asks for temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, and" in line
    assert "with temperature=1, top_k=0, top_p=1, repetition_penalty=1, so" in line
    assert line.endswith("To go by them: temperature=0.6 top_k=20 top_p=0.95 repetition_penalty=1.05")


@pytest.mark.parametrize(
    ("own", "asked", "told"),
    [
        ({}, {}, ""),
        ({"top_k": 0, "temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}, {}, ""),
        (OWN, {name: value for name, value in OWN.items() if name != "do_sample"}, ""),
        (OWN, {"temperature": 0}, "for temperature=0.6, repetition_penalty=1.05, and"),  # filters change nothing then
        ({"do_sample": False, "top_k": 20}, {"temperature": 0}, ""),
        ({"do_sample": False, "top_k": 20}, {}, "for temperature=0, and"),
        ({"top_k": 20}, {"top_k": 30}, "for top_k=20, and texts are drawn here with top_k=30"),
        ({"min_p": 0.1}, {}, "for min_p=0.1, and texts are drawn here with min_p=0"),
    ],
)
def test_only_what_differs_is_said(
    own: dict[str, Any], asked: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    generate(model_with(**own), None, PROMPT, max_new_tokens=1, **asked)
    assert [told in line for line in said(caplog)] == [True] * bool(told)


def test_a_call_that_agrees_does_not_silence_one_that_does_not(caplog: pytest.LogCaptureFixture) -> None:
    model = model_with(top_k=20)
    generate(model, None, PROMPT, max_new_tokens=1, top_k=20)
    assert not said(caplog)
    generate(model, None, PROMPT, max_new_tokens=1)
    assert len(said(caplog)) == 1


def test_transformers_own_generate_goes_by_the_file(caplog: pytest.LogCaptureFixture) -> None:
    model_with(**OWN).generate(PROMPT, custom_generate=speculative, max_new_tokens=2)  # type: ignore[operator]
    assert not said(caplog)


def test_decode_says_how_to_set_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = ModelConfig(path=str(target_with(tmp_path, **OWN)))
    run(DecodeConfig(target=target, prompt="def", decode=SamplingConfig(top_p=0.95), plan=True))
    (line,) = said(caplog)
    assert line.endswith("To go by them: decode.temperature=0.6 decode.top_k=20 decode.repetition_penalty=1.05")


def test_records_say_what_they_cannot_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target_with(tmp_path, **OWN)
    distill(tiny_config(tmp_path))
    (line,) = said(caplog)
    ways = "sampling.temperature=0.6 sampling.top_k=20 sampling.top_p=0.95"
    assert line.endswith(f"To go by them: {ways} (repetition_penalty cannot be set here)")


def test_records_of_a_corpus_and_those_that_agree_say_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target_with(tmp_path, do_sample=True, top_k=20)
    distill(tiny_config(tmp_path, responses="corpus"))
    distill(tiny_config(tmp_path, "agree", sampling=ResponseSampling(top_k=20, max_new_tokens=2)))
    assert not said(caplog)
