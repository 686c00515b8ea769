"""`mode=exits`: what an exit says, what its passes cost, the page, and the profile that `early_exit` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from decode import load_drafter
from decode.autotune.exit_times import ExitTimes, measure_exits
from decode.common.errors import ConfigError, InputError, RunError
from decode.config import ModelConfig
from decode.drafters.base import Batch
from decode.drafters.exit_adapter import ResidualMLP
from decode.drafters.saved_draft import describe_draft
from decode.drafters.untrained.early_exit import EarlyExitDrafter
from decode.forward.resume import Lower
from decode.models.describe import describe_model
from distill.corpora.config import DataConfig
from eval.config import EvalConfig
from eval.measure.alpha import Alphas
from eval.modes.exits import mode
from eval.modes.exits.config import ExitsConfig
from eval.modes.exits.measuring import Exit, ExitFace, entries, exits_of
from eval.modes.exits.page import page_of
from eval.publish import publish
from eval.results.schema import read_results
from tests.eval.golden import check_keys
from tests.tiny import save_tiny_target, tiny_llama

CORPUS = Path(__file__).parents[1] / "tiny_corpus.txt"


def batch() -> Batch:
    ids = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    document = torch.zeros(2, 7, dtype=torch.long)
    return Batch(ids, torch.arange(7).expand(2, 7), document, torch.ones(2, 7, dtype=torch.bool))


def without_layers(model: PreTrainedModel, kept: int) -> PreTrainedModel:
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": kept, "layer_types": None})
    shorter = AutoModelForCausalLM.from_config(config).to(model.dtype).eval()
    shorter.load_state_dict(model.state_dict(), strict=False)
    return shorter


@pytest.mark.parametrize("layer", [1, 2, 3])
@torch.no_grad()
def test_an_exit_says_what_a_model_of_these_layers_alone_would(layer: int) -> None:
    model = tiny_llama(num_layers=4, dtype=torch.float64)
    (step,) = ExitFace(model, Exit("x", layer)).unroll(batch())
    want = without_layers(model, layer)(input_ids=batch().ids).logits
    assert torch.allclose(step.head(step.hidden), want, atol=1e-10)
    assert torch.equal(step.valid, batch().next_token_rows())


@torch.no_grad()
def test_an_adapter_stands_in_place_of_the_layers_above() -> None:
    model = tiny_llama(num_layers=4, dtype=torch.float64)
    adapter = ResidualMLP(model.config.hidden_size, 8, 1e-6).double()
    torch.nn.init.normal_(adapter.down.weight)
    (step,) = ExitFace(model, Exit("x", 2, adapter=adapter)).unroll(batch())
    states = model(input_ids=batch().ids, output_hidden_states=True).hidden_states[2]
    want = model.lm_head(model.model.norm(adapter(states)))
    assert torch.allclose(step.head(step.hidden), want, atol=1e-10)
    again = model(input_ids=batch().ids, output_hidden_states=True).hidden_states
    assert not torch.equal(again[3], again[2]), "the layers above are back in their place"


def test_passes_of_every_exit_are_timed() -> None:
    model = tiny_llama(num_layers=4)
    times = measure_exits(model, [Lower(1), Lower(3)], [1, 3], context=5, batch_size=2, repeats=3)
    assert len(times.t_lower) == len(times.t_rest) == 2
    assert all(set(each) == {1, 3} and min(each.values()) > 0 for each in times.t_rest)
    assert min(times.t_target_1, *times.t_lower) > 0


def test_the_best_length_is_that_of_most_predicted_speedup() -> None:
    """alpha 1 in every position: tau is k + 1, so more is drafted where the rest does not grow."""
    alphas = {"layer 1": Alphas({0: np.ones(9)}), "layer 2": Alphas({0: np.zeros(9)})}
    times = ExitTimes(1.0, (0.25, 0.5), ({1: 0.8, 4: 1.0}, {1: 0.6, 4: 0.7}))
    first, second = entries([Exit("layer 1", 1), Exit("layer 2", 2)], alphas, times, 0.0, [0], 0)
    assert (first.num_draft_tokens, first.predicted_speedup) == (4, pytest.approx(5 / (4 * 0.25 + 1)))
    assert first.alpha == 1
    assert (second.num_draft_tokens, second.predicted_speedup) == (1, pytest.approx(1 / (0.5 + 0.6)))


def test_lengths_that_no_text_has_are_left_out() -> None:
    times = ExitTimes(1.0, (0.25,), ({2: 0.8, 4: 1.0},))
    (entry,) = entries([Exit("layer 1", 1)], {"layer 1": Alphas({0: np.ones(3)})}, times, 0.0, [0], 0)
    assert [one.num_draft_tokens for one in entry.lengths] == [2]
    for texts in ({0: np.ones(1)}, {}):
        with pytest.raises(RunError, match="ended every text before 2 tokens"):
            entries([Exit("layer 1", 1)], {"layer 1": Alphas(texts)}, times, 0.0, [0], 0)


@pytest.mark.parametrize(("num_layers", "want"), [(2, [1]), (4, [1, 2, 3]), (9, list(range(1, 9)))])
def test_all_layers_of_a_shallow_target_are_tried(num_layers: int, want: list[int]) -> None:
    assert ExitsConfig().layers_of(num_layers) == want


def test_of_a_deep_target_eight_layers_are_tried() -> None:
    found = ExitsConfig().layers_of(36)
    assert len(found) == 8
    assert found[-1] == 24
    assert ExitsConfig(layers=[5, 3]).layers_of(36) == [3, 5]


def config(tmp_path: Path, target: Path, **changes: Any) -> EvalConfig:
    cfg = EvalConfig(
        mode="exits",
        output_dir=str(tmp_path / "report"),
        target=ModelConfig(path=str(target), device="cpu"),
        data=DataConfig(name="text", path=str(CORPUS), validation_share=0.4),
        exits=ExitsConfig(draft_lengths=[1, 2]),
        **changes,
    )
    cfg.prompts.tokens, cfg.timing.screening_prompts, cfg.timing.cost_repeats, cfg.decode.max_new_tokens = 4, 2, 3, 6
    return cfg


@pytest.mark.slow
def test_a_profile_is_measured_published_and_drafted_by(tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "target", num_layers=3)
    mode.run(config(tmp_path, target))
    results = read_results(tmp_path / "report" / "results.json")
    check_keys(results, "exits")
    assert [(one["temperature"], one["exit_layer"]) for one in results["exits"]] == [(1, 1), (1, 2), (0, 1), (0, 2)]
    best = max(results["exits"][:2], key=lambda one: one["predicted_speedup"])
    assert results["exit_layer"] == best["exit_layer"]
    assert "T=1: " in page_of(results).markdown()
    assert "<svg" in page_of(results).html()
    assert publish([tmp_path / "report" / "results.json"], tmp_path / "exits")[1].is_file()
    model = AutoModelForCausalLM.from_pretrained(target)
    for profile in (tmp_path / "report", tmp_path / "report" / "results.json"):
        drafter: Any = load_drafter("early_exit", target=model, profile=str(profile))
        assert isinstance(drafter, EarlyExitDrafter)
        assert drafter.exit_layer == best["exit_layer"]


def test_a_profile_of_another_target_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    target = describe_model(ModelConfig(path=str(save_tiny_target(tmp_path / "target", num_layers=3))))
    profile = tmp_path / "results.json"
    of = {"path": "elsewhere", "fingerprint": "0" * 64}
    profile.write_text(json.dumps({"mode": "exits", "target": of, "exit_layer": 1}))
    with pytest.raises(InputError, match="is of elsewhere"):
        describe_draft("early_exit", target, settings={"profile": str(profile)})
    profile.write_text(json.dumps({"mode": "report", "target": of, "exit_layer": 1}))
    with pytest.raises(InputError, match="mode"):
        describe_draft("early_exit", target, settings={"profile": str(profile)})
    with pytest.raises(ConfigError, match="leave one out"):
        describe_draft("early_exit", target, settings={"profile": str(profile), "exit_layer": 1})


@pytest.mark.parametrize(("measured", "refused"), [("int8", True), (None, False)])
def test_a_profile_holds_for_one_rounding_of_the_weights(tmp_path: Path, measured: str | None, refused: bool) -> None:
    target = describe_model(ModelConfig(path=str(save_tiny_target(tmp_path / "target", num_layers=3))))
    of = {"path": target.path, "fingerprint": target.fingerprint, "quantization": measured}
    (tmp_path / "results.json").write_text(json.dumps({"mode": "exits", "target": of, "exit_layer": 1}))
    settings = {"profile": str(tmp_path)}
    if not refused:
        assert describe_draft("early_exit", target, settings=settings).family == "early_exit"
        return
    with pytest.raises(InputError, match=r"quantised: int8.*, no\)\. Measure it"):
        describe_draft("early_exit", target, settings=settings)


def test_a_profile_that_is_not_there_is_named(tmp_path: Path) -> None:
    target = describe_model(ModelConfig(path=str(save_tiny_target(tmp_path / "target", num_layers=3))))
    with pytest.raises(InputError, match="profile=.*nowhere holds no results.json.*mode=exits"):
        describe_draft("early_exit", target, settings={"profile": str(tmp_path / "nowhere")})


def test_layers_beyond_the_target_and_other_drafts_are_refused(tmp_path: Path) -> None:
    target = save_tiny_target(tmp_path / "target", num_layers=3)
    with pytest.raises(InputError, match="has one layer"):
        mode.run(config(tmp_path, save_tiny_target(tmp_path / "shallow", num_layers=1)))
    cfg = config(tmp_path, target)
    cfg.exits.layers = [3]
    with pytest.raises(InputError, match="exit_layer=3"):
        mode.run(cfg)
    draft = save_tiny_target(tmp_path / "draft", num_layers=1)
    with pytest.raises(InputError, match="is of family lm"):
        mode.run(config(tmp_path, target, drafts={"mine": str(draft)}))
    assert not (tmp_path / "report").exists()


def test_a_model_that_cannot_be_parted_is_refused() -> None:
    with pytest.raises(InputError, match="both halves need some"):
        exits_of(tiny_llama(num_layers=2), [2], {})
