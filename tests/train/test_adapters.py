"""Adapters by domain: one draft, an adapter for each kind of text, switched by name, merged in what is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from decode import generate, load_adapters, load_drafter
from decode.common.errors import UserError
from decode.drafters.base import Drafter
from decode.drafters.saved_head import HEADS
from tests.tiers import by_default
from tests.train.toy import data_settings, head_config, save_target, tiny_config
from train.stage import run

PROMPT = torch.arange(10, 18)[None]
SETTINGS: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": (), "seed": 0, "num_draft_tokens": 2}
TARGETS = {"medusa": ["linear"], "hydra": ["linear"], "exit_adapter": ["up", "down"]}
"""Of families without attention the layers that are adapted."""


@pytest.fixture
def trained(tmp_path: Path, target: Path, records: Path, corpus: Path):
    """Trains a draft of a family into a folder of tmp_path, or an adapter of one that is there."""

    def train(name: str, family: str, base: str | None = None, **changes: Any) -> Path:
        lora = {"rank": 4, "alpha": 64.0} | ({"targets": TARGETS[family]} if family in TARGETS else {})
        draft = {} if base is None else {"draft": {"init_from": str(tmp_path / base), "lora": lora}}
        settings: dict[str, Any] = {"steps": 3, **draft, **changes}
        if family == "lm":
            sizes = {"layers": 1, "width": None, "heads": None} if draft else {}
            settings["draft"] = {**settings.get("draft", {}), **sizes}
            run(tiny_config(tmp_path / name, target, records=str(records), **settings))
        else:
            head = {"head": {"taps": [1], "depth": 4}} if family == "exit_adapter" else {}
            run(head_config(tmp_path / name, target, family, data=data_settings(corpus), **head, **settings))
        return tmp_path / name

    return train


def drafted(model: Any, drafter: Drafter) -> tuple[list[int], list[int]]:
    """The text, and how many tokens of each round were accepted."""
    out = generate(model, drafter, PROMPT, **SETTINGS)
    return out.sequences[0].tolist(), [one.accepted for one in out.stats.rounds]


def weights_with(adapters: Any, name: str) -> dict[str, torch.Tensor]:
    """Layer -> its weight with that adapter."""
    layers = {key: one for key, one in adapters.base_model.model.named_modules() if hasattr(one, "lora_A")}
    return {f"{key}.weight": one.base_layer.weight + one.get_delta_weight(name) for key, one in layers.items()}


def held(drafter: Any) -> dict[str, torch.Tensor]:
    module: nn.Module = getattr(drafter, "model", drafter)
    return module.state_dict()


@pytest.mark.parametrize("family", by_default(2, ["dspark", "lm", *(one for one in HEADS if one != "dspark")]))
def test_adapters_are_switched_by_name_and_are_the_drafts_that_were_exported(
    family: str, tmp_path: Path, target: Path, trained: Any
) -> None:
    base = trained("base", family)
    folders = {name: trained(name, family, "base", seed=seed) for name, seed in (("code", 1), ("math", 2))}
    model = AutoModelForCausalLM.from_pretrained(target)
    drafter = load_drafter(base, target=model)
    before, plain = {name: one.clone() for name, one in held(drafter).items()}, drafted(model, drafter)
    adapters = load_adapters(drafter, {name: folder / "adapter" for name, folder in folders.items()})
    for name, folder in folders.items():
        adapters.set_adapter(name)
        merged, own = load_drafter(folder, target=model), weights_with(adapters, name)
        assert own
        for key, weight in own.items():
            torch.testing.assert_close(weight, held(merged)[key], rtol=1e-5, atol=1e-6)
            assert not torch.equal(weight, before[key])
        kept = held(merged).keys() - own.keys()
        assert all(torch.equal(held(merged)[key], before[key]) for key in kept)
        assert drafted(model, drafter) == drafted(model, merged)
        assert drafted(model, drafter)[0] == plain[0]
    with adapters.disable_adapter():
        assert drafted(model, drafter) == plain


def test_an_adapter_of_another_draft_is_refused(tmp_path: Path, target: Path, trained: Any) -> None:
    trained("base", "mtp")
    other, folder = trained("other", "mtp", seed=5), trained("code", "mtp", "base") / "adapter"
    drafter = load_drafter(other, target=AutoModelForCausalLM.from_pretrained(target))
    with pytest.raises(UserError, match=r"'code', .*was trained on the draft .*base.* is another one"):
        load_adapters(drafter, {"code": folder})
    with pytest.raises(UserError, match=r"lacks adapter_config.json and .*give the folder adapter/"):
        load_adapters(drafter, {"code": other / "model"})
    with pytest.raises(UserError, match="was given no adapters"):
        load_adapters(drafter, {})
    (folder / "adapter_of.json").write_text(json.dumps({"path": 3}))
    with pytest.raises(UserError, match="Copy the adapter's folder again"):
        load_adapters(drafter, {"code": folder})


def test_adapters_are_of_the_draft_as_it_was_saved(tmp_path: Path, target: Path, trained: Any) -> None:
    trained("base", "mtp")
    code = trained("code", "mtp", "base", optimizer="muon")
    model = AutoModelForCausalLM.from_pretrained(target)
    drafter = load_drafter(code, target=model)
    with pytest.raises(UserError, match="is another one"):  # the merged draft, of the same shapes
        load_adapters(drafter, {"code": code / "adapter"})
    with pytest.raises(UserError, match="has a dot in its name"):
        load_adapters(drafter, {"a.b": code / "adapter"})
    with pytest.raises(UserError, match="given a NgramDrafter that came from no folder"):
        load_adapters(load_drafter("ngram", target=model), {"code": code / "adapter"})
    base = {"init_from": str(tmp_path / "base"), "lora": {"rank": 4}}
    with pytest.raises(UserError, match=r"lora.rank=4 with draft.window=8: an adapter lies in a draft as it was saved"):
        trained("other", "eagle3", draft=base | {"window": 8})
    moved = save_target(tmp_path / "moved", seed=1)
    with pytest.raises(UserError, match="would belong to no draft of that target"):
        run(head_config(tmp_path / "other", moved, "mtp", data={"name": "python_stdlib"}, draft=base))


def test_layers_that_a_draft_does_not_have_are_named(tmp_path: Path, trained: Any) -> None:
    trained("base", "mtp")
    lora = {"rank": 4, "targets": ["self_attn.q_proj", "gate_porj"]}
    with pytest.raises(UserError, match=r"no layers called gate_porj, which would not be trained. It has .*q_proj"):
        trained("code", "mtp", draft={"init_from": str(tmp_path / "base"), "lora": lora})
    assert not (tmp_path / "code").exists()
