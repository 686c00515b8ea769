"""Every folder that is written for an engine that cannot run here, read by that engine's own rules: each tensor is
taken by exactly one, and each parameter that the engine makes room for is filled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from decode.common.checked_json import read_json
from decode.common.errors import InputError
from tests.train.check.folders import Folders, config_of
from tests.train.export.loaders import sglang, tgi, trtllm, vllm
from tests.train.export.loaders.base import Loader
from tests.train.export.saved_heads import save_head
from train.export.engines import ENGINES
from train.export.engines.base import FORMS, Loads
from train.export.stage import run

TABLES = {"sglang": sglang.LOADERS, "trtllm": trtllm.LOADERS, "tgi": tgi.LOADERS, "vllm": vllm.LOADERS}
TAPS = {"taps": (1, 4, 6)}
MASK = TAPS | {"mask_token": 7}
DRAFTS = {
    "eagle3": ("eagle3", TAPS, False),
    "eagle3, 3.1": ("eagle3.1", TAPS, False),
    "eagle3, reduced": ("eagle3.1-one-norm", TAPS, True),
    "medusa": ("medusa", {}, False),
    "dflash": ("dflash", MASK, False),
    "dflash, learned mask": ("dflash", TAPS, False),
    "dflash2": ("dflash2", MASK, False),
    "dflash2, learned mask": ("dflash2-causal", TAPS, False),
    "dflash2, reduced": ("dflash2", MASK, True),
    "lilicorr": ("lilicorr-convolved", TAPS | {"candidates": 4}, False),
    "lilicorr, learned mask": ("lilicorr", TAPS | {"candidates": 8}, False),
    "lilicorr, reduced": ("lilicorr", MASK | {"candidates": 4}, True),
    "lilicorr, five candidates": ("lilicorr", MASK, False),
    "dspark": ("dspark", MASK, False),
    "dspark, learned mask": ("dspark", TAPS, False),
    "dspark, reduced": ("dspark", MASK, True),
    "dspark, fill-in": ("dspark-fill-in", TAPS, False),
    "dspark, no chances": ("dspark", MASK | {"confidence": False}, False),
}
"""(variant of tests.decode.heads, fields of its configuration, whether its vocabulary is reduced)."""
PAIRS = [
    (engine, draft)
    for engine, forms in TABLES.items()
    for form in forms
    for draft in ("lm", *DRAFTS)
    if draft.split(",")[0] == form
]
REFUSED = {
    ("sglang", "dflash, learned mask"),  # its place is a row that is no token's, and this target has none
    ("sglang", "dspark, learned mask"),
    ("sglang", "dspark, reduced"),
    ("trtllm", "dflash, learned mask"),
    ("trtllm", "dspark, learned mask"),
    ("trtllm", "dspark, reduced"),
    ("trtllm", "dspark, fill-in"),
    ("vllm", "dflash2, reduced"),
    ("vllm", "lilicorr, reduced"),
    ("vllm", "lilicorr, five candidates"),
}
"""Pairs that are not written, since the engine would draft otherwise."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("folders"))


def written(folders: Folders, engine: str, draft: str) -> Path:
    """The folder of that draft for that engine."""
    if draft == "lm":
        saved = folders.draft("llama", "lm")
    else:
        saved = folders.folder / draft
        variant, fields, is_reduced = DRAFTS[draft]
        vocab = torch.arange(0, 300, 3) if is_reduced else None
        if not saved.exists():
            save_head(saved, folders.target("llama"), variant, vocab, **fields)
    output = folders.folder / f"{draft} for {engine}"
    run(replace(config_of(saved, output), format=engine))
    return output


@pytest.mark.parametrize(("engine", "draft"), PAIRS)
def test_its_loader_takes_all_of_it_and_wants_no_more(folders: Folders, engine: str, draft: str) -> None:
    if (engine, draft) in REFUSED:
        with pytest.raises(InputError, match=f"format={engine} cannot be written of"):
            written(folders, engine, draft)
        return
    folder, loader = written(folders, engine, draft), TABLES[engine][draft.split(",")[0]]
    fields, target = read_json(folder / "config.json"), read_json(folders.target("llama") / "config.json")
    taken = [(name, loader.taken(name)) for name in load_file(next(folder.glob("*.safetensors")))]
    assert all(len(to) == 1 for _, to in taken), [one for one in taken if len(one[1]) != 1]
    filled = [to[0] for _, to in taken if to[0] is not None]
    assert len(set(filled)) == len(filled), "one parameter twice"
    assert loader.room(fields) - set(filled) == set(), "stays empty"
    assert set(filled) - loader.room(fields) <= loader.shared, "no room for it"
    assert not [says for says, holds in loader.demands.items() if not holds(fields, target)]


@pytest.mark.parametrize(("engine", "form"), [(engine, form) for engine, forms in TABLES.items() for form in forms])
def test_checks_go_by_the_same_names(engine: str, form: str) -> None:
    """What `train.check` takes for passed over is what the loader passes over."""
    how, loader = ENGINES[engine].forms[form], TABLES[engine][form]
    assert isinstance(how, Loads)
    for name in ("t2d", "embed_tokens.weight", "lm_head.weight", "d2t", "rotary_emb.inv_freq"):
        took = loader.taken(name)
        if took == [None]:
            renamed = how.names.renamed(name)
            assert how.names.passes_over(renamed) or how.names.unknown == "skipped", name
        elif took:
            assert not how.names.passes_over(how.names.renamed(name)), name


def test_every_form_that_is_only_checked_has_a_table() -> None:
    for name, engine in ENGINES.items():
        for form in FORMS:
            how = engine.forms[form]
            if isinstance(how, Loads) and how.tried == "checked" and name != "speculators":
                assert form in TABLES.get(name, {}), (name, form)


def test_a_name_of_no_rule_shows() -> None:
    loader: Loader = sglang.LOADERS["eagle3"]
    assert loader.taken("layers.1.mlp.up_proj.weight") == []
    assert loader.taken("layers.0.mlp.up_proj.weight") == ["model.layers.0.mlp.gate_up_proj.weight[up]"]
