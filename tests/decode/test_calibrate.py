"""Calibration: acceptance by rank, costs of rounds, what is kept of both, and the shape that is chosen from them."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from decode.autotune import choose_tree
from decode.autotune import timing as calibrate
from decode.autotune.choose_tree import acceptance_profile, choose, resolve, static_plans
from decode.autotune.store import FILE, PairCalibration, load_calibration, pair_key, save_calibration
from decode.common.errors import ConfigError, InputError
from decode.config import DecodeConfig, DrafterConfig, ModelConfig, SamplingConfig
from decode.drafters.lm import LMDraft
from decode.drafters.saved_draft import load_drafter
from decode.forward.runner import Runner
from decode.models.load import load_model
from decode.requests import Request
from decode.sampling.warp import Sampling
from decode.stage import run
from decode.trees.sequoia import RoundCosts, expected_tokens, interpolate, level_widths
from decode.trees.tree_plans import Shape, Static, chain, k_ary
from tests.decode import checks
from tests.decode.drafters import Oracle
from tests.decode.heads import random_head
from tests.decode.test_tree_decoding import near
from tests.tiers import by_default
from tests.tiny import save_tiny_target, tiny_llama

VOCAB = checks.VOCAB
PROMPTS = [[5, 9, 2, 7], [1, 8]]
REQUEST = Request(PROMPTS, 24)


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "REPEATS", 2)
    monkeypatch.setattr(calibrate, "NODES", (1, 4, 8))
    monkeypatch.setattr(calibrate, "CHAINS", (1, 3))
    monkeypatch.setattr(calibrate, "WIDTHS", (2, 4))
    monkeypatch.setattr(choose_tree, "TOKENS", 24)
    monkeypatch.setattr(choose_tree, "TOKENS_A_ROW", 12)


# acceptance by rank


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_profile_is_the_rank_of_the_targets_token_on_its_own_text(temperature: float) -> None:
    """Against a teacher-forced pass of the draft over the text of plain decoding, with the very noise."""
    model = tiny_llama(VOCAB, dtype=torch.float64)
    draft = near(model)
    request = replace(REQUEST, sampling=Sampling(temperature), seed=4)
    (profile,) = acceptance_profile(model, draft, request, [3])
    plain, counts, positions = checks.Loop(model, None, request), [0, 0, 0], 0
    for row, text in enumerate(plain.run()[0]):
        logits = draft.model(torch.tensor([text])).logits[0]
        noise = checks.Noise.of(4, [row], VOCAB, torch.device("cpu"))
        for at in range(len(PROMPTS[row]), len(text) - 1):  # the last token of a text is not drafted
            ranking = logits[at - 1] if temperature == 0 else logits[at - 1] + noise.coupled(torch.tensor([[at]]))[0, 0]
            best = ranking.topk(3).indices.tolist()
            positions += 1
            if text[at] in best:
                counts[best.index(text[at])] += 1
    assert profile == pytest.approx([count / positions for count in counts])
    assert profile[0] > 0.3


@pytest.mark.parametrize(
    ("verifier", "replacement"), by_default(1, [("rejection", False), ("rejection", True), ("coupled", False)])
)
def test_profiles_add_up_to_at_most_one_under_every_rule(verifier: str, replacement: bool) -> None:
    model = tiny_llama(VOCAB)
    request = replace(REQUEST, verifier=verifier, replacement=replacement, max_new_tokens=40)
    for row in acceptance_profile(model, LMDraft(model), request, [4, 2]):
        assert row[0] > 0.9  # a draft that is the target
        assert sum(row) <= 1


def test_a_drafter_that_drafts_no_trees_is_refused() -> None:
    model = tiny_llama(VOCAB)
    with pytest.raises(ConfigError, match=r"Oracle drafts.*decode.tree=chain"):
        checks.generate(model, Oracle([[1] * 40], VOCAB), torch.ones(1, 4).long(), tree="sequoia", max_new_tokens=8)


# costs


def test_costs_of_every_kind_of_round_are_measured() -> None:
    model = tiny_llama(VOCAB)
    costs = calibrate.measure_rounds(model, near(model.double()), REQUEST, context=20, batch_size=2)
    assert {name: sorted(table) for name, table in asdict(costs).items()} == {
        "t_target": [1, 4, 8], "t_chain": [1, 3], "t_root": [2, 4], "t_level": [2, 4]
    }  # fmt: skip
    assert min(costs.t_target.values()) > 0
    assert costs.seconds(k_ary([4, 1])) > interpolate(costs.t_target, 9)


def test_a_rule_without_trees_is_timed_on_chains_only_and_one_without_chains_on_trees() -> None:
    model = tiny_llama(VOCAB)
    block = calibrate.measure_rounds(model, LMDraft(model), replace(REQUEST, verifier="block"), 20, 1)
    assert (block.t_chain.keys(), block.t_root, block.t_level) == ({1, 3}, {}, {})
    alike = replace(REQUEST, verifier="rejection", replacement=True)
    assert calibrate.measure_rounds(model, LMDraft(model), alike, 20, 1).t_chain == {}


def test_interleaving_ends_early_where_time_is_short() -> None:
    calls = []
    seconds = calibrate.interleaved({"a": lambda: calls.append(1)}, 50, torch.device("cpu"), limit_s=0.0)
    assert len(seconds["a"]) == 3
    assert len(calls) == 4


def test_between_and_beyond_timed_sizes() -> None:
    table = {2: 1.0, 4: 2.0, 8: 2.0}
    assert [interpolate(table, size) for size in (1, 2, 3, 4, 6, 8, 16)] == [1.0, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]
    assert interpolate({2: 1.0, 4: 2.0}, 8) == 4.0
    assert interpolate({4: 3.0}, 1) == 3.0


def test_rounds_cost_by_their_levels() -> None:
    assert level_widths(Static((-1, 0, 0, 0, 1, 1, 2, 4))) == [3, 2, 1]
    costs = RoundCosts({1: 8.0, 8: 15.0}, {1: 1.0, 4: 4.0}, {2: 2.0, 4: 2.0}, {2: 0.5, 4: 1.0})
    assert costs.seconds(chain(3)) == 3.0 + 11.0
    assert costs.seconds(k_ary([2, 1])) == 2.0 + 0.5 + 12.0
    assert costs.seconds(chain(0)) == 8.0


# the choice


def known(profile: list[float], per_node: float, per_level: float) -> PairCalibration:
    """A machine on which a target's pass costs 1 and `per_node` for each further node, a draft's level `per_level`."""
    target = {n: 1 + per_node * (n - 1) for n in (1, 32)}
    level = {2: per_level, 16: per_level}
    return PairCalibration([profile], RoundCosts(target, {1: per_level, 8: 8 * per_level}, level, level))


@pytest.mark.parametrize(
    ("profile", "per_node", "per_level", "wins"),
    [
        ([0.7, 0.15, 0.08], 0.0, 0.01, "tree"),  # wide passes are free
        ([0.7, 0.15, 0.08], 0.3, 0.01, "chain"),  # each node costs
        ([0.9, 0.01, 0.01], 0.02, 0.01, "chain"),  # siblings bring nothing
        ([0.3, 0.25, 0.2], 0.0, 0.5, "one level"),  # levels cost, siblings do not
    ],
)
def test_the_best_static_plan_fits_the_machine(
    profile: list[float], per_node: float, per_level: float, wins: str
) -> None:
    calibration = known(profile, per_node, per_level)
    shape, speedup = choose(15, calibration, REQUEST)
    assert isinstance(shape, Static)
    assert {"tree": not shape.is_chain and shape.depth > 1, "chain": shape.is_chain, "one level": shape.depth == 1}[
        wins
    ]
    rivals: list[Static] = [chain(k) for k in range(1, 9)] + [
        k_ary([3]),
        k_ary([2, 2]),
        k_ary([3, 1]),
        k_ary([2, 2, 2]),
    ]
    for rival in rivals:
        rate = expected_tokens(rival.parents, [profile]) / calibration.costs.seconds(rival)
        assert speedup >= rate * calibration.costs.t_target[1] - 1e-12


def test_plans_keep_to_the_nodes_they_are_given() -> None:
    assert max(plan.num_nodes for plan in static_plans([[0.6, 0.2]], 5)) == 6


# what is kept


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return save_tiny_target(folder / "target"), save_tiny_target(folder / "draft", seed=1, num_layers=1)


def loaded(pair: tuple[Path, Path]):  # noqa: ANN201
    target = load_model(ModelConfig(path=str(pair[0]), device="cpu"))
    return target, load_drafter(pair[1], target)


@pytest.mark.slow
def test_a_calibration_is_measured_once_and_kept_beside_the_draft(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, drafter = loaded(pair)
    ids = torch.tensor([[5, 9, 2, 7]])
    settings = {"max_new_tokens": 10, "eos_token_id": (), "seed": 0}
    plain = checks.generate(model, None, ids, **settings)  # type: ignore[arg-type]
    logging.getLogger("draftsmith").propagate = True
    with caplog.at_level(logging.INFO, "draftsmith"):
        out = checks.generate(model, drafter, ids, tree="sequoia", **settings)  # type: ignore[arg-type]
    assert torch.equal(out.sequences, plain.sequences)
    assert "times plain decoding" in caplog.text
    assert (pair[1] / FILE).is_file()
    monkeypatch.setattr(choose_tree, "_measured", None)  # a second measurement would fail
    again, other = loaded(pair)  # another process: nothing in memory
    checks.generate(again, other, ids, tree="sequoia", **settings)  # type: ignore[arg-type]


def test_what_is_read_is_what_was_written(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    model, drafter = loaded(pair)
    calibration = known([0.6, 0.2], 0.1, 0.1)
    key = pair_key(model, drafter, REQUEST, 1)
    save_calibration(tmp_path, key, known([0.1], 0.1, 0.1))
    save_calibration(tmp_path, key, calibration)
    assert load_calibration(tmp_path, key) == calibration


@pytest.mark.parametrize(
    "change",
    [{"verifier": "rejection"}, {"replacement": True}, {"sampling": Sampling(0.5)}, {"sampling": Sampling(top_k=3)}],
    ids=str,
)
def test_another_rule_or_distribution_is_another_calibration(
    change: dict, tmp_path: Path, pair: tuple[Path, Path]
) -> None:  # fmt: skip
    model, drafter = loaded(pair)
    save_calibration(tmp_path, pair_key(model, drafter, REQUEST, 1), known([0.6], 0.1, 0.1))
    assert load_calibration(tmp_path, pair_key(model, drafter, replace(REQUEST, **change), 1)) is None
    assert load_calibration(tmp_path, pair_key(model, drafter, REQUEST, 2)) is None
    assert load_calibration(tmp_path, pair_key(model.double(), drafter, REQUEST, 1)) is None


def test_a_folder_that_cannot_be_written_to_only_warns(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, content: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("decode.common.checked_json.write_json", refuse)
    logging.getLogger("draftsmith").propagate = True
    model, drafter = loaded(pair)
    save_calibration(pair[1], pair_key(model, drafter, REQUEST, 1), known([0.6], 0.1, 0.1))
    assert "Permission denied" in caplog.text


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=FILE):
        load_calibration(tmp_path, {})


def test_models_made_in_memory_are_measured_once_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny_llama(VOCAB)
    drafter = LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3))
    first = resolve(5, model, drafter, REQUEST)
    monkeypatch.setattr(choose_tree, "_measured", None)
    assert resolve(5, model, drafter, REQUEST) is first
    resolve(6, model, drafter, REQUEST)  # another size, chosen by the same measurement
    assert list(tmp_path.iterdir()) == []


def test_the_plan_names_the_tree_that_was_measured(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """The key that is made without loading weights is the one that the loaded models make."""
    model, drafter = loaded(pair)
    request = replace(REQUEST, sampling=Sampling(0.9))
    calibration = known([0.6, 0.2], 0.0, 0.01)
    config = DecodeConfig(
        ModelConfig(path=str(pair[0]), device="cpu"), DrafterConfig(str(pair[1])),
        SamplingConfig(temperature=0.9, tree="sequoia", tree_nodes=5), prompt="def main():", plan=True,
    )  # fmt: skip
    logging.getLogger("draftsmith").propagate = True
    with caplog.at_level(logging.INFO, "draftsmith"):
        run(config)
        assert "tree=sequoia: not measured yet" in caplog.text
        save_calibration(pair[1], pair_key(model, drafter, request, 1), calibration)
        run(config)
        assert "tree=sequoia: a tree of 5 draft tokens" in caplog.text
        assert "times plain decoding" in caplog.text


def test_without_a_draft_there_is_nothing_to_choose() -> None:
    shape: Shape = resolve(16, tiny_llama(VOCAB), None, REQUEST)
    assert shape == chain(0)


# heads that draft fewer tokens than they are asked for


def ticking(monkeypatch: pytest.MonkeyPatch, seconds: float = 1.0) -> None:
    """A clock on which a pass of the target or the draft takes nothing, and a drafted token `seconds`."""
    now = [0.0]
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: now[0])
    real = calibrate._proposal

    def proposal(drafter, request, wanted, plan):  # noqa: ANN001, ANN202
        propose = real(drafter, request, wanted, plan)

        def timed():  # noqa: ANN202
            tree = propose()
            now[0] += seconds * tree.max_depth
            return tree

        return timed

    monkeypatch.setattr(calibrate, "_proposal", proposal)


def test_a_draft_token_costs_what_it_costs_whatever_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(num_layers=6).requires_grad_(False)
    ticking(monkeypatch)
    for draft in (random_head("medusa", model), LMDraft(tiny_llama(num_layers=1))):
        assert calibrate.measure(model, draft, 20, [1, 9], repeats=2).t_draft == pytest.approx(1.0)


@pytest.mark.parametrize(("depth", "chains"), [(2, {1: 1.0, 2: 2.0}), (4, {1: 1.0, 3: 3.0, 4: 4.0})])
def test_costs_of_rounds_are_those_of_what_was_drafted(
    depth: int, chains: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(num_layers=6).requires_grad_(False)
    head = random_head("medusa", model)
    head.most_tokens = depth
    ticking(monkeypatch)
    monkeypatch.setattr(calibrate, "CHAINS", (1, 3, 8))
    costs = calibrate.measure_rounds(model, head, REQUEST, context=20, batch_size=1)
    assert costs.t_chain == pytest.approx(chains)
    assert set(costs.t_root.values()) == {1.0}
    assert set(costs.t_level.values()) == {1.0}


def test_bare_passes_are_timed_as_captures_from_the_first_repeat_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are captured as a whole, so their parts run nowhere else: of ten repeats six were once uncaptured, a plain
    step took twice its time, and what a draft was predicted to bring was wrong."""
    model = tiny_llama(VOCAB)
    captured = []
    keep = Runner._keep
    monkeypatch.setattr(Runner, "_keep", lambda self, *given: (captured.append(given[0][0]), keep(self, *given)))
    costs = calibrate.measure(model, LMDraft(tiny_llama(VOCAB, num_layers=1, seed=3)), 20, [1, 4], repeats=1)
    assert sorted(captured) == ["chain", "straight", "straight"]
    assert set(costs.t_target) == {1, 4}
