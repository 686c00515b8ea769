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
from eval.modes import profile
from tests.eval.test_report import Page
from tests.tiny import save_tiny_target


@pytest.fixture(scope="module", autouse=True)
def uncaptured():
    """Captures would cost these tests more than the passes do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)
        patch.setattr(profile, "TURNS", 1)
        patch.setattr(profile, "COST_REPEATS", 1)
        yield


def config(folder: Path, **changes) -> EvalConfig:
    values = {
        "output_dir": str(folder / "profile"),
        "target": {"path": str(folder / "target")},
        "drafts": {"one": str(folder / "draft")},
        "prompts": {"file": str(folder / "questions.jsonl")},
        "decode": {"num_draft_tokens": 3},
        "mode": "profile",
        "profile": {"prompts": 3, "max_new_tokens": 12},
        "timing": {"batch_size": 2, "sweep": []},
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
def arms(folder) -> dict[str, dict]:
    found = json.loads((folder / "profile/profile.json").read_text())
    return {arm["name"]: arm for arm in found["arms"]}


def test_both_arms_spend_their_rounds_in_phases(arms):
    assert list(arms) == ["own autoregressive loop", "one k=3"]
    for arm in arms.values():
        spent = arm["ms_per_round"]
        assert list(spent) == ["draft", "target", "verify", "commit", "other"]
        assert all(ms >= 0 for ms in spent.values())
        assert spent["target"] > spent["verify"]
    plain, drafted = arms.values()
    assert (plain["tokens_per_round"], drafted["tokens_per_round"]) == (2.0, 8.0)  # two rows; the draft is the target
    assert drafted["ms_per_round"]["draft"] > 10 * plain["ms_per_round"]["draft"]


def test_the_floor_is_the_bare_passes_of_a_round(arms):
    plain, drafted = arms.values()
    assert set(plain["floor_ms_per_round"]) == {"target"}
    assert set(drafted["floor_ms_per_round"]) == {"draft", "target"}
    assert all(ms > 0 for arm in arms.values() for ms in arm["floor_ms_per_round"].values())


def test_operators_are_found_in_the_phase_that_called_them(arms):
    drafted = arms["one k=3"]["operators_ms_per_round"]
    assert set(drafted) == set(PHASES) - {"prefill"}
    for phase in ("draft", "target"):
        assert all(drafted[phase][kind] > 0 for kind in ("matmul", "attention", "elementwise")), phase
    assert drafted["target"]["cache writes"] > 0
    assert "matmul" not in drafted["verify"]


def test_the_python_gap_is_what_operators_leave_of_a_phase():
    found = {"matmul": 0.004, "elementwise": 0.001}  # seconds of two rounds
    assert profile._classes(found, 2, 6.0) == {"matmul": 2.0, "elementwise": 0.5, "Python gap": 3.5}
    assert profile._classes(found, 2, 2.0)["Python gap"] == 0.0  # the profiler slows operators down


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
    stats, square = Stats(1), torch.ones(64, 64)

    def call():
        with stats.phase("target"):
            torch.mm(square, square)
        torch.mm(square, square)

    found = operators.profiled(call, on_cuda=False)
    assert found["target"]["matmul"] > 0
    assert all(not classes for phase, classes in found.items() if phase != "target")


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
    for part in ("A round by phase", "Phases by operator", "Python gap", "bare passes", "cores", "Command", "T=1"):
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


def test_a_round_is_in_milliseconds_and_reading_the_prompt_is_no_part_of_it():
    phases = {"prefill": 5.0, "draft": 1.0, "target": 2.0, "verify": 0.5, "commit": 0.5}
    call = profile.Call(Stats(1, seconds=phases, arrival_s=[6.0, 7.0, 8.0, 9.0]), seconds=11.0)
    assert call.ms_per_round() == {"draft": 250.0, "target": 500.0, "verify": 125.0, "commit": 125.0, "other": 500.0}
