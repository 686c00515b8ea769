"""llama.cpp and we compute the same of one file, which its own converter made of a model of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.config import ModelConfig
from decode.models.compatibility import load_tokenizer
from decode.models.gguf.tokenizer import CUTS
from decode.models.load import load_model
from tests.decode.test_gguf import gemma3, llama
from tests.engines.environment import llamacpp_python
from tests.engines.test_openai_servers import llamacpp, serving
from tests.gguf_files import CUT_TEXT, crossing_tokenizer, write_gguf
from tests.tiny import PAD, tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.engines
PROMPTS = [[5, 17, 203, 4, 88, 88, 31, 9, 120, 64, 2, 71], [7, 7, 250, 33, 101], [299]]
"""The first reaches beyond Gemma's window of 6 tokens."""
ROUNDING = 5e-5
GELU_ROUNDING = 1e-3
"""llama.cpp looks up Gemma's GELU in a table of float16: 3e-4 were measured, and 5e-5 with such a table here, too."""
MODELS: dict[str, tuple[Callable[[], PreTrainedModel], float]] = {
    "llama": (partial(llama, num_key_value_heads=2), ROUNDING),
    "tied": (partial(llama, tie_word_embeddings=True), ROUNDING),
    "gemma3": (gemma3, GELU_ROUNDING),
}
"""What makes the model, and by how much a log probability may differ."""


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_llamacpp(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llamacpp_python()  # skips before anything is made
    make, tolerance = MODELS[kind]
    model = make()
    rows = model.config.vocab_size
    model.save_pretrained(tmp_path / "target")
    tokenizer = tiny_tokenizer(300)
    tokenizer.save_pretrained(tmp_path / "target")
    drawn = tokenizer("x")["input_ids"][0]
    with llamacpp(tmp_path / "target", tmp_path) as url:
        theirs = torch.stack([log_p(url.removesuffix("/v1"), prompt, rows, drawn) for prompt in PROMPTS])
    source = ModelConfig(str(tmp_path / "target.gguf"), dtype="float32")
    for ours in (load_model(source), model):
        torch.testing.assert_close(our_log_p(ours), theirs, rtol=0.0, atol=tolerance)
    monkeypatch.setattr("decode.models.gguf.weights._undone", lambda name, values, *_: values)
    as_stored = (our_log_p(load_model(source)) - theirs).abs().max()
    assert as_stored > 100 * tolerance, "norms that count from 1, or rotary pairs side by side, would pass unseen"


@pytest.mark.parametrize("cut", CUTS)
def test_text_is_cut_as_by_llamacpp(tmp_path: Path, cut: str) -> None:
    llamacpp_python()
    tokenizer = crossing_tokenizer()
    file = write_gguf(tmp_path / "a.gguf", tiny_llama(500), tokenizer, tokenizer__ggml__pre=cut)
    ours = load_tokenizer(ModelConfig(str(file)))
    with serving(file, tmp_path) as url:
        found = posted(f"{url.removesuffix('/v1')}/tokenize", {"content": CUT_TEXT + PAD, "add_special": True})
    assert ours(CUT_TEXT + PAD)["input_ids"] == found["tokens"]


def our_log_p(model: PreTrainedModel) -> Tensor:
    """(prompts, rows) log probabilities of the token behind each prompt."""
    logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
    return torch.stack(logits).detach().log_softmax(-1)


def log_p(address: str, prompt: list[int], rows: int, drawn: int) -> Tensor:
    """(rows,) log probabilities of the token behind the prompt, before any bias. What is drawn is a whole character:
    of parts of one, llama.cpp tells nothing."""
    asked = {"prompt": prompt, "n_predict": 1, "n_probs": rows, "logit_bias": [[drawn, 1000.0]], "cache_prompt": False}
    told = posted(f"{address}/completion", asked)["completion_probabilities"][0]["top_logprobs"]
    found = torch.full((rows,), float("nan"))
    for one in told:
        found[one["id"]] = one["logprob"]
    assert not found.isnan().any(), f"{len(told)} of {rows} tokens"
    return found


def posted(address: str, asked: dict[str, Any]) -> Any:
    """The answer."""
    request = Request(address, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        return json.load(answer)
