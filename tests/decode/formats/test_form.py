"""Folders that hold no head: left to who reads language models, whatever is in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from decode.formats.form import published_form
from tests.tiny import save_tiny_target


def test_a_language_model_is_no_head(tmp_path: Path) -> None:
    assert published_form(save_tiny_target(tmp_path / "lm")) is None


def test_a_quantised_language_model_is_none_either(tmp_path: Path) -> None:
    """Types of tensors are looked at in heads alone."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({name: torch.zeros(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    assert published_form(tmp_path) is None


@pytest.mark.parametrize("content", ["{", "[]", '{"architectures": 3}', "{}"])
def test_what_its_own_reader_refuses_is_left_to_it(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    assert published_form(tmp_path) is None
