"""The draft length of a report is chosen on prompts that it does not report, and the page says so."""

import json

import pytest

from decode.common.errors import ConfigError
from decode.common.typed_config import build
from eval import stage
from eval.config import EvalConfig
from eval.measure import cells as choose
from eval.modes.report import with_chosen_length
from eval.prompts.held_out import load_prompts
from eval.render.report_page import page_of
from tests.commands import built
from tests.eval import test_report
from tests.eval.compare import test_decoders
from tests.tiny import tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    test_report.make_models(tmp_path)
    test_decoders.write_sources(tmp_path / "sources")
    return tmp_path


def values(folder, **timing) -> dict:
    small = {"prompts": 2, "rounds": 1, "screening_prompts": 1, "screening_tokens": 8, "sweep": [], "cost_repeats": 1}
    return {
        **test_report.values(folder),
        "drafts": {"distilled": str(folder / "draft/model")},
        "data": {"name": "text", "path": str(folder / "sources"), "heldout_share": 0.4, "validation_share": 0.3},
        "prompts": {"tokens": 12},
        "temperatures": [1.0],
        "timing": {**small, **timing},
        "peers": {"num_assistant_tokens": []},
        "lossless": {"prompts": 3, "tokens": 6, "other_prompts": 2, "other_tokens": 4, "batch_size": 4},
        "curve_temperatures": [],
    }


@pytest.mark.slow
def test_the_fastest_length_is_the_reports(folder, monkeypatch):
    monkeypatch.setattr(choose, "tokens_per_s", lambda samples: len(samples[0][0].rounds))
    stage.run(build(EvalConfig, values(folder, choose_k=[2, 1])))
    results = json.loads((folder / "report/results.json").read_text())
    choice = results["length_choice"]
    assert choice["num_draft_tokens"] == 1  # the draft is the target: k=1 takes the most rounds, called fastest here
    assert choice["source"] == "validation split of text"
    assert list(choice["tokens_per_s"]) == ["2", "1"]
    assert [row["num_draft_tokens"] for row in results["rows"]] == [1]
    assert "k=1, the fastest at T=1 on 1 prompts of the validation split of text" in page_of(results).markdown()


def test_no_prompt_of_the_choice_is_reported(folder):
    cfg, tokenizer = build(EvalConfig, values(folder, choose_k=[1, 2], screening_prompts=2)), tiny_tokenizer()
    sets = load_prompts(cfg, tokenizer, 256)
    chosen_on = {prompt.document for prompt in sets.screening}
    assert len(chosen_on) == 2
    assert not chosen_on & {prompt.document for prompt in sets.reported}


def test_without_a_choice_the_configured_length_is_used(folder):
    cfg = build(EvalConfig, values(folder))
    assert with_chosen_length(cfg, {"transformers assisted": "k=3,c=0"}) is cfg


def test_a_validation_split_without_prompts_is_refused(folder):
    cfg = build(EvalConfig, {**values(folder, choose_k=[1], screening_prompts=400), "prompts": {"tokens": 12}})
    assert 0 < len(load_prompts(cfg, tiny_tokenizer(), 256).screening) < 400
    cfg.data.validation_share = 0.0
    with pytest.raises(ConfigError, match="the validation split of data=text gives 0 prompts"):
        load_prompts(cfg, tiny_tokenizer(), 256)


def test_the_toy_has_one_length_so_that_its_runs_can_be_pooled():
    cfg = built("eval", ["experiment=toy_report"])
    assert isinstance(cfg, EvalConfig)
    assert cfg.timing.choose_k == []
    with pytest.raises(ConfigError, match="timing.choose_k"):
        built("eval", ["experiment=toy_report", "timing.choose_k=[0]"])
