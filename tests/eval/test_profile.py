"""Profiles: phases that add up, floors, operators by name, and a picture of its own."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from decode.common.errors import ConfigError
from decode.common.typed_config import build
from decode.stats import PHASES, Stats
from eval import stage
from eval.config import EvalConfig
from eval.measure import operators
from eval.modes.profile import calls, mode
from eval.modes.profile.calls import Call
from eval.modes.profile.figures import OUT_OF_ROUND, Profile, ProfiledArm, Turn, _classes, outside
from eval.modes.profile.page import parts
from tests.eval.energy_checks import check_estimated
from tests.eval.golden import check_keys
from tests.eval.test_report import Page
from tests.tiny import save_tiny_target

SHORT = {"prompts": 3, "max_new_tokens": 12}


@pytest.fixture(scope="module", autouse=True)
def uncaptured():
    """Captures would cost these tests more than the passes do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)
        patch.setattr(mode, "TURNS", 1)
        patch.setattr(calls, "COST_REPEATS", 1)
        yield


def config(folder: Path, **changes) -> EvalConfig:
    values = {
        "output_dir": str(folder / "profile"),
        "target": {"path": str(folder / "target")},
        "drafts": {"one": str(folder / "draft")},
        "prompts": {"file": str(folder / "questions.jsonl")},
        "decode": {"num_draft_tokens": 3},
        "mode": "profile",
        "profile": SHORT,
        "timing": {"batch_size": 2, "sweep": [], "watts": 50.0},
        "lossless": {"prompts": 12, "tokens": 16, "other_prompts": 1, "other_tokens": 1},
        "peers": {"num_assistant_tokens": []},
    }
    return build(EvalConfig, {**values, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    save_tiny_target(folder / "target", seed=0)
    save_tiny_target(folder / "draft", seed=0)
    lines = [{"question_id": i, "turns": [f"def f{i}(a, b):"]} for i in range(6)]
    (folder / "questions.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    stage.run(config(folder))
    return folder


@pytest.fixture(scope="module")
def arms(folder) -> dict[str, ProfiledArm]:
    text = (folder / "profile/profile.json").read_text()
    check_keys(json.loads(text), "profile")
    return {arm.name: arm for arm in Profile.model_validate_json(text).arms}


def test_both_arms_spend_their_rounds_in_phases(arms):
    assert list(arms) == ["own autoregressive loop", "one k=3"]
    for arm in arms.values():
        spent = arm.ms_per_round
        assert list(spent) == [*(phase for phase in PHASES if phase != "prefill"), "other"]
        assert all(ms >= 0 for ms in spent.values())
    plain, drafted = arms.values()
    assert (plain.tokens_per_round, drafted.tokens_per_round) == (2.0, 8.0)  # two rows; the draft is the target


def test_both_arms_have_an_energy_by_the_stated_watts(folder):
    found = json.loads((folder / "profile/profile.json").read_text())
    check_estimated(found, ["own autoregressive loop", "one k=3"])
    assert "(estimate)" in (folder / "profile/profile.md").read_text()


def test_a_round_is_its_bare_passes_and_what_is_outside_of_them(arms):
    for arm in arms.values():
        levels = parts(arm)
        low, high = arm.outside_passes_ms_ci95 or [levels["outside passes"]] * 2
        assert low <= levels["outside passes"] <= high
        assert levels["bare target"] == arm.floor_ms_per_round["target"] > 0
        assert levels["other"] == arm.ms_per_round["other"]
    assert parts(arms["one k=3"])["bare draft"] > 0 == parts(arms["own autoregressive loop"])["bare draft"]


def test_the_floor_is_the_bare_passes_of_a_round(arms):
    plain, drafted = arms.values()
    assert set(plain.floor_ms_per_round) == {"target"}
    assert set(drafted.floor_ms_per_round) == {"draft", "target"}
    assert all(ms > 0 for arm in arms.values() for ms in arm.floor_ms_per_round.values())


def test_operators_are_found_in_the_phase_that_called_them(arms):
    drafted = arms["one k=3"].operators_ms_per_round
    assert set(drafted) == set(PHASES) - {"prefill"}
    in_round = [classes for phase, classes in drafted.items() if phase not in OUT_OF_ROUND]
    for kind in ("matmul", "attention", "elementwise", "cache writes"):
        assert sum(classes.get(kind, 0.0) for classes in in_round) > 0, kind


def test_the_python_gap_is_what_operators_leave_of_a_phase():
    found = {"matmul": 0.004, "elementwise": 0.001}  # seconds of two rounds
    assert _classes(found, 2, 6.0) == {"matmul": 2.0, "elementwise": 0.5, "Python gap": 3.5}
    assert _classes(found, 2, 2.0)["Python gap"] == 0.0  # the profiler slows operators down


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "matmul"),
        ("mkldnn::_linear_pointwise", "matmul"),
        ("aten::bmm", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_softmax", "attention"),
        ("aten::_index_put_impl_", "cache writes"),
        ("aten::silu", "elementwise"),
        ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "matmul"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise"),
        ("void at::native::index_elementwise_kernel<128, 4, index_put_kernel>", "cache writes"),
    ],
)
def test_operators_and_kernels_are_known_by_name(name, kind):
    assert operators.class_of(name) == kind


def test_phases_are_marked_while_a_profiler_runs():
    stats, square, phase = Stats(1), torch.ones(64, 64), PHASES[1]

    def call():
        with stats.phase(phase):
            torch.mm(square, square)
        torch.mm(square, square)

    found = operators.profiled(call, on_cuda=False)
    assert found[phase]["matmul"] > 0
    assert all(not classes for name, classes in found.items() if name != phase)


def test_the_page_is_whole_and_names_nothing_outside_itself(folder):
    text = (folder / "profile/profile.html").read_text()
    page = Page()
    page.feed(text)
    assert page.tags.count("svg") == 2
    assert "http" not in text
    assert "script" not in page.tags
    for plot in (part.split("</svg>")[0] for part in text.split("<svg")[1:]):
        ElementTree.fromstring(f'<svg xmlns:xlink="x"{plot}</svg>')
        assert "one k=3" in plot


def test_the_summary_has_both_tables_and_the_machine(folder):
    text = (folder / "profile/profile.md").read_text()
    for part in ("A round by part", "Phases by operator", "Python gap", "outside passes", "cores", "Command", "T=1"):
        assert part in text


def test_a_finished_profile_is_left_alone_and_nothing_is_overwritten(folder, monkeypatch):
    monkeypatch.setattr("eval.inputs.load_model", lambda *_: pytest.fail("weights were loaded"))
    stage.run(config(folder, resume="auto"))
    with pytest.raises(ConfigError, match="already holds"):
        stage.run(config(folder))


def test_a_plan_writes_nothing(folder, capsys):
    stage.run(config(folder, plan=True, output_dir=str(folder / "planned")))
    assert "3 prompts" in capsys.readouterr().out
    assert not (folder / "planned").exists()


def turn(seconds: float, floor: float, tokens: int = 8, host: float = 0.5) -> Turn:
    """Four rounds in `seconds`, the prompt in 5 s of them; what is neither that nor host nor two more is the round."""
    phases = {"prefill": 5.0, "round": seconds - 7.0 - host, "host": host}
    return Turn(Call(seconds, tokens, 4, phases), {"target": floor})


def test_a_round_is_in_milliseconds_and_reading_the_prompt_is_no_part_of_it():
    stats = Stats(1, seconds={"prefill": 5.0, "round": 3.5, "host": 0.5}, arrival_s=[6.0, 7.0, 8.0, 9.0])
    call = Call.of(stats, seconds=11.0)
    assert call.ms_per_round() == {"round": 875.0, "host": 125.0, "other": 500.0}


def test_what_is_outside_of_passes_is_the_rounds_own_beyond_the_passes_timed_beside_it():
    turns = [turn(11.5, 700.0), turn(13.5, 1200.0), turn(9.5, 150.0)]  # rounds of 1000, 1500 and 500 ms
    assert [one.round_ms for one in turns] == [1000.0, 1500.0, 500.0]
    assert outside(turns) == {"outside_passes_ms": 300.0, "outside_passes_ms_ci95": [300.0, 350.0]}
