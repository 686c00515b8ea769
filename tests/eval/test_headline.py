"""What competes for a headline, on prompts that are not reported, and what a report then leads with."""

import json
from pathlib import Path
from typing import Any

import pytest

from decode.common.errors import ConfigError
from decode.common.typed_config import build
from eval import stage
from eval.config import EvalConfig
from eval.publish import publish
from eval.render.report_page import page_of
from eval.results.headline import headline_row, over_peer, rivals
from eval.results.pooling import pool
from eval.results.reported import Report
from tests.eval.reports import machine, peer, report, row
from tests.eval.test_report import GOOD, make_models, values

BLOCK = {"block": {"verifier": "block"}, "short": {"num_draft_tokens": 1}}
COMPETING = {"drafts": ["distilled", "undistilled"], "settings": BLOCK}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("headline")
    make_models(folder)
    asked = values(folder) | {"headline": COMPETING, "curve_temperatures": [], "prompts": {"file": prompts(folder)}}
    asked |= {"peers": {"num_assistant_tokens": []}, "temperatures": [1.0]}
    asked["timing"] |= {"prompts": 2, "sweep": [1]}
    asked["lossless"] |= {"prompts": 3, "other_prompts": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)  # captures would cost more than the passes do
        stage.run(build(EvalConfig, asked))
    return json.loads((folder / "report/results.json").read_text())


def prompts(folder: Path) -> str:
    """Of one category."""
    file = folder / "plain.jsonl"
    file.write_text("\n".join(json.dumps({"question_id": i, "turns": [f"def f{i}("]}) for i in range(5)))
    return str(file)


@pytest.mark.slow
def test_every_rival_is_timed_and_the_fastest_on_other_prompts_has_the_headline(results: dict[str, Any]) -> None:
    (sampled,) = results["headline"]
    arms = ["distilled k=2", "distilled block", "distilled short"]
    arms += [arm.replace("distilled", "undistilled") for arm in arms]
    assert [one["arm"] for one in sampled["rivals"]] == arms
    assert sampled["prompts"] == results["prompts"]["screening"]
    fastest = max(sampled["rivals"], key=lambda one: one["tokens_per_s"])
    found = headline_row(Report.model_validate(results))
    assert found is not None
    assert sampled["best"] == fastest["arm"]
    for name in ("draft", "setting", "verifier", "num_draft_tokens"):
        assert getattr(found, name) == fastest[name]


@pytest.mark.slow
def test_rows_of_other_settings_have_alpha_and_speed_but_no_count_of_mismatches(results: dict[str, Any]) -> None:
    rows = [one for one in results["rows"] if one["setting"] is not None]
    assert {(one["draft"], one["setting"], one["temperature"], one["verifier"]) for one in rows} == {
        *((draft, "block", 1.0, "block") for draft in COMPETING["drafts"]),
        *((draft, "short", 1.0, "coupled") for draft in COMPETING["drafts"]),
    }
    for one in rows:
        usual = next(
            other for other in results["rows"] if same(one, other, "draft", "temperature") and not other["setting"]
        )
        assert (one["alpha"], one["alpha_ci95"]) == (usual["alpha"], usual["alpha_ci95"])
        assert (one["mismatches"], one["uncached_mismatches"]) == (None, None)
        assert one["speedup"] > 0
        assert (one["uncached_dtype_flips"] is None) == (one["verifier"] == "block")
    lengths = [point["num_draft_tokens"] for point in results["sweeps"]["num_draft_tokens"]["points"]]
    assert lengths == [1, 2]  # of the sweep alone, though a rival has one of them, too


def same(one: dict[str, Any], other: dict[str, Any], *names: str) -> bool:
    return all(one[name] == other[name] for name in names)


@pytest.mark.slow
def test_the_page_says_who_competed_and_shows_both_rules_side_by_side(results: dict[str, Any]) -> None:
    text = page_of(results).markdown()
    best = results["headline"][0]["best"]
    assert f"Fastest at T=1: {best}, on 1 prompts" in text
    assert "the fastest of 6 drafts and settings" in text
    for name in ("distilled, block", "distilled, short"):
        assert f"| 1 | {name} |" in text
    assert 'class="card"' in page_of(results).html()


def contest(best: str, **speeds: float) -> list[dict[str, Any]]:
    found = {"mine k=2": ("mine", None, "coupled"), "mine block": ("mine", "block", "block")}
    given = dict(zip(found, speeds.values(), strict=True))
    named = ("draft", "setting", "verifier")
    each = [
        {"arm": arm, **dict(zip(named, of, strict=True)), "num_draft_tokens": 2, "tokens_per_s": given[arm]}
        for arm, of in found.items()
    ]
    return [{"temperature": 1.0, "best": best, "prompts": 1, "source": "others", "rivals": each}]


def competed(best: str, coupled: float, block: float, **changes: Any) -> dict[str, Any]:
    """The block row twice as fast as the coupled one; theirs is 0.6 s a token."""
    rows = [row(), row(setting="block", verifier="block", mismatches=None, seconds_by_prompt=[[0.4, 0.05], [0.4, 0.1]])]
    held = peer([[0.6, 0.1], [0.6, 0.2]], ratio_ours_over_peer=4.5)
    head = contest(best, coupled=coupled, block=block)
    return report(rows, headline=head, peers=[held], **changes)


def test_the_winner_leads_even_where_another_row_is_faster() -> None:
    found = headline_row(Report.model_validate(competed("mine k=2", 9.0, 8.0)))
    assert found is not None
    assert found.setting is None
    found = headline_row(Report.model_validate(competed("mine block", 8.0, 9.0)))
    assert found is not None
    assert found.setting == "block"


def test_the_peer_is_held_against_the_winner() -> None:
    results = competed("mine block", 8.0, 9.0)
    found = Report.model_validate(results)
    usual, block = found.rows
    (held,) = found.peers
    assert over_peer(found, usual, held).ratio_ours_over_peer == 4.5  # as measured
    assert over_peer(found, block, held).ratio_ours_over_peer == pytest.approx((12 + 6) / 2)
    text = page_of(results).markdown()
    assert "9.00" in text
    assert "the target's own in distribution" in text


def test_of_several_runs_the_fastest_by_the_median_of_their_choices_leads() -> None:
    runs = [
        competed("mine block", 5.0, 6.0, environment=machine(started="1")),
        competed("mine k=2", 9.0, 6.5, environment=machine(started="2")),
        competed("mine block", 5.5, 7.0, environment=machine(started="3")),
    ]
    results = pool(runs)
    pooled = Report.model_validate(results)
    assert pooled.headline[0].best == "mine block"  # 6.5 against 5.5
    assert [one.tokens_per_s for one in pooled.headline[0].rivals] == [5.5, 6.5]
    block = headline_row(pooled)
    assert block is not None
    assert block.setting == "block"
    held = over_peer(pooled, block, pooled.peers[0])
    assert held.ratio_ours_over_peer == pytest.approx(9.0)
    assert held.ratio_by_run == pytest.approx([9.0] * 3)
    assert "mine, block" in page_of(results).markdown()


def test_results_without_a_contest_lead_with_the_first_draft(tmp_path: Path) -> None:
    found = headline_row(Report.model_validate(report()))
    assert found is not None
    assert found.draft == "mine"
    older = report()
    older.pop("headline", None)
    (tmp_path / "one.json").write_text(json.dumps(older))
    publish([tmp_path / "one.json"], tmp_path / "page")
    assert "mine" in (tmp_path / "page.md").read_text()


def test_at_temperature_0_settings_that_differ_in_the_rule_alone_are_one() -> None:
    cfg = build(EvalConfig, {**GOOD, "headline": {"drafts": ["d"], "settings": BLOCK}})
    assert [one.arm for one in rivals(cfg, 1.0)] == ["d k=5", "d block", "d short"]
    assert [(one.arm, one.settings.verifier) for one in rivals(cfg, 0.0)] == [
        ("d k=5", "greedy"),
        ("d short", "greedy"),
    ]


def test_nothing_competes_unless_asked() -> None:
    assert rivals(build(EvalConfig, GOOD), 1.0) == []


@pytest.mark.parametrize(
    ("headline", "message"),
    [
        ({"drafts": ["e"]}, r"headline.drafts names \['e'\]"),
        ({"drafts": ["d"], "settings": {"k=1": {"num_draft_tokens": 1}}}, r"headline.settings names \['k=1'\], as"),
        ({"settings": {"block": {}}}, "for no draft"),
        ({"drafts": ["d"], "settings": {"block": {"verify": "block"}}}, "unknown keys"),
        ({"drafts": ["d"], "settings": {"lossy": {"verifier": "typical", "lossy": True}}}, "lossy"),
    ],
)
def test_what_cannot_compete_is_refused(headline: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(EvalConfig, {**GOOD, "headline": headline})


def test_a_length_is_chosen_in_one_way() -> None:
    asked = {"headline": {"drafts": ["d"]}, "timing": {"choose_k": [2, 3]}}
    with pytest.raises(ConfigError, match="leave one of them out"):
        build(EvalConfig, {**GOOD, **asked})
    assert build(EvalConfig, {**GOOD, **asked, "mode": "profile"}).headline.drafts == ["d"]
