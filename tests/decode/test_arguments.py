"""Arguments of `generate()` and settings of a generation_config that would be read as something else: honoured as what
they mean, said, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from decode import generate, speculative
from decode.common.errors import ConfigError
from decode.config import DecodeConfig, ModelConfig
from decode.drafters.lm import LMDraft
from decode.sampling import own_settings
from decode.sampling.config import SamplingConfig
from decode.sampling.penalties import penalties
from decode.sampling.stopping import StopStrings, eos_ids, own_eos_ids
from decode.stage import run
from distill.config import ResponseSampling
from distill.stage import run as distill
from tests.commands import MINIMUM, built
from tests.decode.checks import VOCAB, ragged_prompts
from tests.distill.runs import tiny_config
from tests.tiny import save_tiny_target, tiny_llama, tiny_tokenizer

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(VOCAB)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bias nan": ({"logit_bias": {5: NAN}}, r"logit_bias\[5\]=nan is not finite"),
    "bias inf": ({"logit_bias": {5: -INF}}, r"logit_bias\[5\]=-inf is not finite"),
    "bias text": ({"logit_bias": {5: "high"}}, r"logit_bias\[5\]='high' is of type str"),
    "bias list": ({"logit_bias": [5]}, "does not map tokens"),
    "bias bool": ({"logit_bias": {True: 1.0}}, "is of type bool"),
    "bias real key": ({"logit_bias": {5.5: 1.0}}, "5.5 is of type float"),
    "repetition nan": ({"repetition_penalty": NAN}, "repetition_penalty=nan"),
    "repetition inf": ({"repetition_penalty": INF}, "repetition_penalty=inf"),
    "repetition 0": ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
    "repetition -1": ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0"),
    "presence nan": ({"presence_penalty": NAN}, r"presence_penalty=nan is outside \[-2, 2\]"),
    "frequency inf": ({"frequency_penalty": INF}, "frequency_penalty=inf"),
    "frequency text": ({"frequency_penalty": "1"}, "frequency_penalty='1' is of type str"),
    "bans of one text": ({"banned_words": "foo"}, "is not a list"),
    "bans of a stream": ({"banned_words": (one for one in [1])}, "is not a list"),
    "empty ban": ({"banned_words": [""], "tokenizer": object()}, "empty text"),
    "bool ban": ({"banned_words": [True]}, "is of type bool"),
    "end outside": ({"eos_token_id": VOCAB}, r"eos_token_id=\[64\].*0 to 63"),
    "one end outside": ({"eos_token_id": [5, 99]}, r"\[5, 99\]"),
    "end below": ({"eos_token_id": -1}, r"\[-1\]"),
    "end text": ({"eos_token_id": "</s>"}, "is of type str"),
    "end real": ({"eos_token_id": torch.tensor([5.5])}, "is of type float"),
    "end bool": ({"eos_token_id": True}, "is of type bool"),
    "empty stop": ({"stop_strings": [""], "tokenizer": object()}, "empty text"),
    "empty stop alone": ({"stop_strings": "", "tokenizer": object()}, "empty text"),
    "stop number": ({"stop_strings": ["a", 3], "tokenizer": object()}, "are not texts"),
    "tokens true": ({"max_new_tokens": True}, "max_new_tokens=True is of type bool"),
    "tokens real": ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 is of type float"),
    "tokens none": ({"max_new_tokens": None}, "max_new_tokens=None"),
    "seed real": ({"seed": 1.5}, "seed=1.5"),
    "seed long": ({"seed": 2**64}, "64 bits"),
    "rows alike": ({"rows": [3, 3]}, r"rows=\[3, 3\].*share their noise"),
    "rows real": ({"rows": [0, 1.5]}, "rows=1.5"),
    "rows none": ({"rows": [0, None]}, "rows=None"),
    "top_k real": ({"top_k": 2.5}, "top_k=2.5"),
    "top_p nan": ({"top_p": NAN}, "top_p=nan"),
    "top_p text": ({"top_p": "0.9"}, "top_p='0.9' is of type str"),
    "min_p nan": ({"min_p": NAN}, "min_p=nan"),
    "temperature text": ({"temperature": "1"}, "temperature='1' is of type str"),
    "temperature true": ({"temperature": True}, "temperature=True is of type bool"),
    "temperature none": ({"temperature": None}, "temperature=None"),
    "k real": ({"num_draft_tokens": 2.0}, "num_draft_tokens=2.0"),
    "nodes true": ({"tree": "dynamic", "tree_nodes": True}, "tree_nodes=True"),
    "tree number": ({"tree": 3}, "tree=3 is not a tree"),
    "flag text": ({"strict": "false"}, "strict='false' is of type str"),
    "flag number": ({"adaptive": 1}, "adaptive=1 is of type int"),
    "audit text": ({"audit": "yes"}, "audit='yes'"),
    "batch true": ({"batch_size": True}, "batch_size=True"),
    "unknown": ({"num_draft_token": 4}, "unknown key 'num_draft_token'. Did you mean 'num_draft_tokens'"),
    "pad list": ({"pad_token_id": [0]}, "pad_token_id"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_read_as_something_else_is_refused(model: Any, name: str) -> None:
    settings, words = REFUSED[name]
    ids, mask = ragged_prompts(2)
    call: dict[str, Any] = {"max_new_tokens": 2} | settings
    with pytest.raises(ConfigError, match=words):
        generate(model, None, ids, mask, **call)


def test_numbers_of_other_libraries_mean_what_they_say(model: Any) -> None:
    ids, mask = ragged_prompts(2)
    plain = generate(model, None, ids, mask, max_new_tokens=6, seed=3, temperature=0.5, top_k=9, rows=[4, -1])
    other: dict[str, Any] = {
        "max_new_tokens": np.int64(6),
        "seed": torch.tensor(3),
        "temperature": np.float32(0.5),
        "top_k": np.int32(9),
        "rows": torch.tensor([4, -1]),
        "batch_size": np.int64(2),
    }
    assert torch.equal(generate(model, None, ids, mask, **other).sequences, plain.sequences)


def test_seeds_below_zero_are_seeds(model: Any) -> None:
    ids, _ = ragged_prompts(1)
    texts = [generate(model, None, ids, max_new_tokens=8, seed=seed).sequences for seed in (-1, -1, 1, -(2**63))]
    assert torch.equal(texts[0], texts[1])
    assert not any(torch.equal(texts[0], one) for one in texts[2:])


@pytest.mark.parametrize("kind", [int, list, tuple, torch.tensor, np.array, lambda one: torch.tensor([one])])
def test_end_tokens_come_in_any_form(model: Any, kind: Any) -> None:
    ids, _ = ragged_prompts(1)
    call: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0}
    end = int(generate(model, None, ids, eos_token_id=(), **call, seed=0).sequences[0, -6])
    given = kind([end]) if kind in (list, tuple) else kind(end)
    assert generate(model, None, ids, eos_token_id=given, **call, seed=0).stats.finish_reasons == ["eos"]


def test_own_end_tokens_beyond_the_vocabulary_count_only_where_none_is_left() -> None:
    """Of a model whose vocabulary was cut, some do not come any more; where all do not, texts would never end."""
    own = GenerationConfig(eos_token_id=[5, 999])
    assert eos_ids(None, own, VOCAB) == own_eos_ids(own, VOCAB) == [5]
    assert eos_ids((), GenerationConfig(eos_token_id=999), VOCAB) == []
    assert eos_ids(7, GenerationConfig(eos_token_id=999), VOCAB) == [7]
    with pytest.raises(ConfigError, match=r"the model's own generation_config.eos_token_id=\[999\].*0 to 63"):
        eos_ids(None, GenerationConfig(eos_token_id=999), VOCAB)


def test_a_model_with_no_end_token_inside_its_vocabulary_asks_for_one() -> None:
    model, (ids, _) = tiny_llama(VOCAB), ragged_prompts(1)
    model.generation_config.eos_token_id = 999  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"\[999\]"):
        generate(model, None, ids, max_new_tokens=2)
    assert generate(model, None, ids, max_new_tokens=2, eos_token_id=(), seed=0).stats.finish_reasons == ["length"]
    theirs = model.generate(ids, do_sample=False, max_new_tokens=4, pad_token_id=0)  # type: ignore[operator]
    asked: Any = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0, "custom_generate": speculative}
    assert torch.equal(model.generate(ids, **asked), theirs)  # type: ignore[operator]


def test_a_draft_of_another_vocabulary_is_refused(model: Any) -> None:
    ids, _ = ragged_prompts(1)
    with pytest.raises(ConfigError, match="knows 70 tokens and the target 64"):
        generate(model, LMDraft(tiny_llama(70, num_layers=1)), ids, max_new_tokens=2)


# texts that stand for tokens


def test_two_biases_of_one_token_are_refused() -> None:
    tokenizer = tiny_tokenizer()
    token = tokenizer.encode("z")[0]
    with pytest.raises(ConfigError, match=rf"token\(s\) \[{token}\] the biases 1.0 and 2.0.*'z'"):
        penalties(300, tokenizer, SamplingConfig(logit_bias={token: 1.0, "z": 2.0}))
    assert len(penalties(300, tokenizer, SamplingConfig(logit_bias={token: 1.0, "z": 1.0}))) == 1


def test_a_text_without_tokens_is_refused() -> None:
    class Deaf:
        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            return {"input_ids": []}

    with pytest.raises(ConfigError, match="names the text '~~'.*makes no token"):
        penalties(300, Deaf(), SamplingConfig(banned_words=["~~"]))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_the_command_line_refuses_what_generate_refuses(name: str, value: float) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=f"{name}="):
        SamplingConfig(**settings)
    with pytest.raises(ConfigError, match=r"logit_bias\[3\]="):
        SamplingConfig(logit_bias={3: value})


def test_the_command_line_asks_for_what_generate_does_by_default() -> None:
    config: Any = built("decode", MINIMUM["decode"])
    assert config.decode == SamplingConfig()
    assert SamplingConfig().num_draft_tokens == 5


def test_a_stop_string_may_stand_alone() -> None:
    tokenizer = tiny_tokenizer()
    model, ids = tiny_llama(300), torch.tensor([[5, 6, 7]])
    call: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": (), "tokenizer": tokenizer, "seed": 0}
    stop = str(tokenizer.decode(generate(model, None, ids, **call).sequences[0, 8:10]))
    alone, listed = (generate(model, None, ids, stop_strings=one, **call) for one in (stop, [stop]))
    assert alone.stats.finish_reasons == ["stop"]
    assert torch.equal(alone.sequences, listed.sequences)
    assert StopStrings.of((), None) is None
    words = [" hi", " User", ":"]
    stripping: Any = SimpleNamespace(decode=lambda tokens: "".join(words[one] for one in tokens).removeprefix(" "))
    assert StopStrings(stripping, (" User:",)).ends([0, 0, 1, 2], 2), "as Llama 2's tokenizer decodes"
    assert not StopStrings(stripping, ("hi User:",)).ends([0, 0, 1, 2], 2), "which began in the prompt"


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
