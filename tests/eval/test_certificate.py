"""Certificates: what is compared, what is found, what a kill costs, and how a wrong decoder fails."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from decode.common.errors import ConfigError, RunError
from decode.common.sealed import read_sealed
from decode.common.typed_config import build
from decode.models.compatibility import load_tokenizer
from eval import inputs, stage
from eval.config import EvalConfig
from eval.measure import certificate_parts as comparison
from eval.measure.continuations import continue_batch
from eval.modes import certificate
from eval.prompts.held_out import as_many_as
from tests.commands import built
from tests.eval.golden import check_keys
from tests.eval.test_uncached import off_by_one
from tests.tiny import save_tiny_target

TOKENS, OTHER = 150, 60


@pytest.fixture(scope="module", autouse=True)
def uncaptured():
    """Captures of a few passes each would cost these tests three times what the passes do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decode.forward.runner.CAPTURE_AFTER", 10**9)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("certificate")
    save_tiny_target(folder / "target", seed=0)
    save_tiny_target(folder / "draft", seed=0, initializer_range=0.29)  # accepts some
    lines = [{"question_id": i, "turns": [f"def f{i}(a, b):"]} for i in range(6)]
    (folder / "questions.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return folder


def config(models: Path, output: Path, **changes) -> EvalConfig:
    values = {
        "output_dir": str(output),
        "target": {"path": str(models / "target"), "dtype": "bfloat16"},
        "drafts": {"one": str(models / "draft"), "other": str(models / "nowhere")},
        "prompts": {"file": str(models / "questions.jsonl")},
        "decode": {"num_draft_tokens": 3, "max_new_tokens": 16},
        "mode": "certificate",
        "certificate": {"tokens": TOKENS, "other_tokens": OTHER},
        "lossless": {"prompts": 12, "tokens": 24, "other_prompts": 1, "other_tokens": 1, "batch_size": 4},
    }
    return build(EvalConfig, {**values, **changes})


def read(output: Path) -> dict:
    return json.loads((output / "certificate.json").read_text())


@pytest.fixture(scope="module")
def issued(models, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("issued") / "certificate"
    stage.run(config(models, output))
    return output


def test_every_part_is_compared_in_full_and_the_decoder_passes(issued):
    check_keys(read(issued), "certificate")
    parts = {(part["dtype"], part["temperature"]): part for part in read(issued)["parts"]}
    assert list(parts) == [("float32", 0.0), ("float32", 1.0), ("bfloat16", 0.0), ("bfloat16", 1.0)]
    assert parts["float32", 0.0]["tokens"] >= TOKENS
    assert all(part["tokens"] >= OTHER for part in parts.values())
    assert all(part["mismatches"] == 0 for part in parts.values())
    assert all(part["uncached_mismatches"] == 0 for part in parts.values())
    assert all(part["uncached_tokens_checked"] == part["tokens"] for part in parts.values())
    assert parts["bfloat16", 1.0]["uncached_flips_per_token"] < 0.1  # rounding
    assert [part["is_judged"] for part in parts.values()] == [True, True, False, False]
    assert read(issued)["failures"] == []


def test_the_certificate_says_in_words_what_was_done_on_what(issued):
    text, found = (issued / "certificate.md").read_text(), read(issued)
    for words in ("No mismatch in", "Exact in distribution; equal in fp64", "cores", "Seed", "torch 2", "Command"):
        assert words in text
    for model in (found["target"], found["draft"]):
        assert len(model["fingerprint"]) == 64
        assert model["fingerprint"] in text
    assert found["decode"]["num_draft_tokens"] == 3


def test_prompts_that_are_used_again_get_openings_and_noise_of_their_own(models, issued):
    cfg = config(models, Path("unused"))
    model, _ = inputs.load(replace(cfg, drafts={"one": cfg.drafts["one"]}), cfg.target)
    prompts = as_many_as(cfg, load_tokenizer(cfg.target), 100)
    first, again = (comparison._jobs(cfg, model, prompts, chunk) for chunk in (0, 2))
    assert {job.row for job in first}.isdisjoint(job.row for job in again)
    assert all(
        b.prompt[: len(a.prompt)] == a.prompt and b.prompt != a.prompt for a, b in zip(first, again, strict=True)
    )
    rows = read(issued)["parts"][0]["sequences"]
    assert rows > len(prompts)  # more texts were compared than there are prompts


@pytest.mark.slow
@pytest.mark.parametrize("kill_after", [1, 4])
def test_a_killed_run_resumes_to_the_same_counts(models, issued, tmp_path, monkeypatch, kill_after):
    output, chunk, done = tmp_path / "certificate", comparison._compare_chunk, []

    def killed(*arguments):
        if len(done) == kill_after:
            raise KeyboardInterrupt
        done.append(1)
        chunk(*arguments)

    monkeypatch.setattr(comparison, "_compare_chunk", killed)
    with pytest.raises(KeyboardInterrupt):
        stage.run(config(models, output))
    assert not (output / "certificate.json").exists()
    kept = read_sealed(output / "progress.json")
    assert sum(part["chunks"] for part in kept.values()) == kill_after
    monkeypatch.setattr(comparison, "_compare_chunk", chunk)
    stage.run(config(models, output, resume="auto"))
    assert [without_times(part) for part in read(output)["parts"]] == [
        without_times(part) for part in read(issued)["parts"]
    ]


def without_times(part: dict) -> dict:
    return {name: value for name, value in part.items() if name != "seconds"}


def wrong_decoder(monkeypatch, at: int):
    """Every speculative text has a wrong token at one place."""

    def broken(model, drafter, settings, seed, jobs):
        texts = continue_batch(model, drafter, settings, seed, jobs)
        if drafter is None:
            return texts
        return [
            replace(t, new=(*t.new[:at], (t.new[at] + 1) % 300, *t.new[at + 1 :])) if len(t.new) > at else t
            for t in texts
        ]

    monkeypatch.setattr(comparison, "continue_batch", broken)


def test_a_decoder_that_changes_the_text_fails_with_exit_code_1(models, tmp_path, monkeypatch):
    wrong_decoder(monkeypatch, at=20)
    cfg = config(models, tmp_path / "c", temperatures=[0.0], certificate={"tokens": 80, "other_tokens": 20})
    with pytest.raises(RunError, match=r"not lossless: 4 mismatches in 96 tokens \(float32, T=0\).*certificate.md"):
        stage.run(cfg)
    found = read(tmp_path / "c")
    entry = found["parts"][0]["divergences"][0]
    assert entry["target_token"] != entry["speculative_token"]
    assert entry["gap"] > entry["top2_margin"] * 0.999
    assert "NOT lossless" in (tmp_path / "c" / "certificate.md").read_text()
    with pytest.raises(RunError, match="not lossless"):  # the verdict stays when it is asked for again
        stage.run(replace(cfg, resume="auto"))


@pytest.mark.slow
def test_a_fault_that_both_loops_share_fails_too(models, tmp_path, monkeypatch):
    off_by_one(monkeypatch)
    sizes = {"tokens": 30, "other_tokens": 30}
    with pytest.raises(RunError, match=r"not lossless: \d+ mismatches of the autoregressive text with an uncached"):
        stage.run(config(models, tmp_path / "c", temperatures=[1.0], certificate=sizes))
    wide, own = read(tmp_path / "c")["parts"][1::2]
    assert (wide["mismatches"], len(wide["divergences"])) == (0, 0)  # both loops are wrong alike
    assert wide["uncached_mismatches"] + wide["uncached_near_ties"] == wide["uncached_flips"] > 0
    assert own["uncached_mismatches"] == 0  # bfloat16 is not judged: its rate tells
    assert own["uncached_flips_per_token"] > 0.1
    assert "NOT lossless" in (tmp_path / "c" / "certificate.md").read_text()


def failures(*rows: dict, strict: bool = False) -> list[str]:
    return certificate.failures([certificate.CertifiedPart.model_construct(**row) for row in rows], strict)


def test_divergences_in_the_targets_own_precision_are_listed_and_no_failure_unless_strict():
    judged = {"tokens": 10, "dtype": "float32", "temperature": 0.0, "mismatches": 0, "divergences": []}
    judged |= {"uncached_mismatches": 0, "uncached_tokens_checked": 10}
    listed = {**judged, "dtype": "bfloat16", "divergences": [{}]}
    assert failures(judged, listed) == []
    assert failures(judged, listed, strict=True) == [
        "1 divergence in 10 tokens (bfloat16, T=0), although decode.strict=true"
    ]
    assert failures({**judged, "mismatches": 2}) == ["2 mismatches in 10 tokens (float32, T=0)"]
    assert failures({**judged, "uncached_mismatches": 1}) == [
        "1 mismatch of the autoregressive text with an uncached forward in 10 tokens (float32, T=0)"
    ]


@pytest.mark.slow
def test_strict_has_no_divergence_in_bf16_and_states_its_cost(models, tmp_path, monkeypatch):
    monkeypatch.setattr("eval.measure.certificate_parts.PADDING_ROUNDS", 1)
    decode = {"num_draft_tokens": 3, "max_new_tokens": 16, "strict": True}
    stage.run(config(models, tmp_path / "c", decode=decode))
    found = read(tmp_path / "c")
    assert [len(part["divergences"]) for part in found["parts"]] == [0, 0, 0, 0]
    assert set(found["padding"]["tokens_per_s"]) == {"plain", "plain_padded", "speculative", "speculative_padded"}
    assert all(speed > 0 for speed in found["padding"]["tokens_per_s"].values())
    assert "What strict costs" in (tmp_path / "c" / "certificate.md").read_text()


@pytest.mark.slow
def test_the_time_given_is_shared_by_the_parts_and_ends_the_run(models, tmp_path):
    sizes = {"tokens": 10**6, "other_tokens": 10**6, "minutes": 1e-4}
    stage.run(config(models, tmp_path / "c", certificate=sizes))
    assert all(0 < part["tokens"] <= 96 for part in read(tmp_path / "c")["parts"])
    assert "1,000,000" in (tmp_path / "c" / "certificate.md").read_text()


def test_shares_of_time_follow_tokens_and_leftovers_go_on(models, tmp_path):
    parts = certificate.parts_of(config(models, tmp_path), "bfloat16")
    state = comparison.State.open(tmp_path / "progress.json", parts)
    assert state.allowed_s(parts[0], parts, None) == float("inf")
    total = TOKENS + 3 * OTHER
    assert state.allowed_s(parts[0], parts, 1.0) == pytest.approx(60 * TOKENS / total)
    state.parts[parts[0].name].seconds = 10
    assert state.allowed_s(parts[1], parts, 1.0) == pytest.approx(50 / 3)


def test_a_target_served_in_float32_has_no_parts_of_its_own(models, tmp_path):
    assert {part.dtype for part in certificate.parts_of(config(models, tmp_path), "float32")} == {"float32"}


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_rules_that_keep_the_distribution_alone_are_refused_with_the_way_out(models, verifier):
    with pytest.raises(
        ConfigError, match=r"keeps the distribution.*pytest tests/decode -k distribution.*verifier=coupled"
    ):
        config(models, Path("x"), decode={"verifier": verifier})
    tests = (Path(__file__).parents[1] / "decode").glob("test_*.py")
    assert any(re.search(r"def test_\w*distribution", file.read_text()) for file in tests)


@pytest.mark.parametrize("mode", ["report", "certificate", "profile"])
def test_the_mode_and_the_name_say_where_the_result_lies(mode: str) -> None:
    minimum = ["target.path=t", "drafts.one=d", "certificate.tokens=5", f"mode={mode}"]
    plain, named = built("eval", minimum), built("eval", ["name=mine", *minimum])
    assert isinstance(plain, EvalConfig)
    assert isinstance(named, EvalConfig)
    assert (plain.mode, plain.name, plain.certificate.tokens, plain.output_dir) == (
        mode,
        mode,
        5,
        f"runs/{mode}/report",
    )
    assert (named.mode, named.name, named.output_dir) == (mode, "mine", f"runs/mine/{mode}")


def test_a_plan_says_parts_and_writes_nothing(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inputs, "load_model", lambda *_: pytest.fail("weights were loaded"))
    stage.run(config(models, tmp_path / "c", plan=True))
    assert "float32, T=0: 150 tokens" in capsys.readouterr().out
    assert not (tmp_path / "c").exists()
