"""The vLLM runtime by proxy: a worker of a few lines in place of the engine; and what is refused before one starts."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Olmo2Config, Olmo2ForCausalLM

from decode.common.checked_json import read_json
from decode.common.errors import ConfigError, InputError, RunError
from decode.common.typed_config import build
from decode.config import ModelConfig
from decode.models.describe import describe_model
from distill import __main__ as cli
from distill.config import DistillConfig, ResponseDraftConfig, ResponseSampling, TargetConfig
from distill.engines.vllm_support import check_rope
from distill.records.config import FeatureConfig, RecordsConfig
from distill.responses import OnResponse, Response, ignored
from distill.runtimes import vllm_runtime
from distill.runtimes.kept_responses import kept_responses
from distill.stage import CALL, calls, open_runtime, run
from tests.distill.engine_runs import LAYERS, asked, changed, config_of, opened, proxy, quantised
from tests.distill.vllm_proxy import state_of
from tests.tiny import save_tiny_target, tiny_tokenizer
from tests.train.export.saved_heads import save_head


@torch.no_grad()
def test_p_and_final_states_are_made_of_the_engine_s_by_the_target_s_norm_and_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy(tmp_path, monkeypatch)
    run(config_of(tmp_path))
    records = opened(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target").eval()
    assert len(records) == 13
    for index in range(13):
        record = records.read(index)
        raw = torch.from_numpy(state_of(record.ids.tolist(), 2, 32))
        embedded = target.model.embed_tokens(torch.from_numpy(record.ids.astype(np.int64)))
        final = target.model.norm(raw)
        wanted = torch.stack([raw, final, embedded], 1)
        arrays = {name: torch.from_numpy(array) for name, array in record.features.items()}
        torch.testing.assert_close(records.feature_code.decode(arrays, LAYERS), wanted.bfloat16(), atol=0.01, rtol=0.01)
        log_p = target.lm_head(final).log_softmax(-1)[np.flatnonzero(record.loss_mask) - 1]
        found = torch.from_numpy(record.payload["full.log_p"]).float()
        torch.testing.assert_close(found, log_p, atol=0.01, rtol=0.001)
    assert {records.read(index).meta["finish_reason"] for index in range(13)} == {"eos", "length"}
    told = records.manifest.runtime
    assert told is not None
    assert (told.name, told.version, told.dtype) == ("vllm", "0.fake", "float32")
    assert records.manifest.target.weights is None  # they were never in this process


def test_one_engine_writes_everything_then_another_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a code is fitted to the first texts before any shard is written."""
    worker = proxy(tmp_path, monkeypatch)
    features = FeatureConfig(list(LAYERS), "int8", calibration_prompts=5)
    run(config_of(tmp_path, records=RecordsConfig(shard_size=5, features=features)))
    lines = asked(worker)
    starts = [index for index, line in enumerate(lines) if "target" in line]
    assert len(starts) == 2
    writing, reading = (lines[index] for index in starts)
    assert (writing["max_model_len"], writing["max_num_seqs"], writing["dtype"]) == (14, 3, "float32")
    assert "states" not in writing
    assert reading["max_model_len"] == 15  # a token behind the longest text, thrown away
    assert reading["states"]["layers"] == [0, 2]
    calls = lines[1 : starts[1]]
    assert [len(call["prompts"]) for call in calls] == [13]
    assert all(call["eos"] == [tiny_tokenizer().eos_token_id] for call in calls)
    assert len({seed for call in calls for seed in call["seeds"]}) == 13
    assert not {file.name for file in (tmp_path / "records").iterdir()} & {"responses", "states"}


def test_sampling_reaches_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proxy(tmp_path, monkeypatch)
    run(config_of(tmp_path, sampling=ResponseSampling(0.5, 7, 0.9, 0.1, max_new_tokens=3)))
    call = asked(worker)[1]
    assert call["max_new_tokens"] == 3
    assert call["sampling"] == {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1}


def drafted(folder: Path, output: str = "records", num_draft_tokens: int = 4, **changes: object) -> DistillConfig:
    """With a draft LM, which is made where it is missing."""
    if not (folder / "draft").exists():
        save_tiny_target(folder / "draft", seed=3)
    asked = ResponseDraftConfig(str(folder / "draft"), num_draft_tokens=num_draft_tokens)
    return config_of(folder, output, sampling=ResponseSampling(max_new_tokens=8, draft=asked), **changes)


def test_a_draft_is_handed_to_the_engine_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proxy(tmp_path, monkeypatch)
    run(drafted(tmp_path))
    writing, reading = (line for line in asked(worker) if "target" in line)
    folder = str((tmp_path / "draft").resolve())
    assert writing["speculation"] == {"method": "draft_model", "model": folder, "num_speculative_tokens": 4}
    assert writing["max_model_len"] == 14 + 4
    assert reading["speculation"] is None
    assert reading["max_model_len"] == 15
    told = opened(tmp_path).manifest
    assert told.runtime is not None
    assert told.runtime.draft is not None
    assert (told.runtime.draft.path, told.runtime.draft.num_draft_tokens) == (str(tmp_path / "draft"), 4)
    (saved,) = told.drafting
    assert saved.draft == told.runtime.draft
    assert saved.tokens == 3 + 12 * 8  # the first of a call ends after three
    assert saved.passes == 2 + 12 * 4  # the proxy gives two tokens a step


def test_a_text_that_fills_the_context_leaves_no_room_for_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = proxy(tmp_path, monkeypatch)
    save_tiny_target(tmp_path / "target", max_position_embeddings=16)
    run(drafted(tmp_path))
    writing = next(line for line in asked(worker) if "target" in line)
    assert writing["max_model_len"] == 16


@pytest.mark.parametrize("then", ["none", "other", "longer"])
def test_a_run_that_vllm_drafts_for_goes_on_with_that_draft_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Its noise is drawn for the draft, so the text depends on it."""
    worker = proxy(tmp_path, monkeypatch)
    (worker / "die").touch()
    config = drafted(tmp_path, resume="auto")
    with pytest.raises(RunError):
        run(config)
    if then == "other":
        save_tiny_target(tmp_path / "draft", seed=4)
    now = {"none": config_of, "other": drafted, "longer": partial(drafted, num_draft_tokens=5)}[then]
    with pytest.raises(InputError, match=r"was started with .*draft.*records of both would be mixed"):
        run(now(tmp_path, resume="auto"))
    (worker / "die").unlink()
    if then != "other":
        run(config)


def own_head(folder: Path) -> str:
    save_head(folder / "draft", folder / "target", "eagle3")
    return str(folder / "draft")


def hydra(folder: Path) -> str:
    save_head(folder / "draft", folder / "target", "hydra")
    return str(folder / "draft")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (own_head, "a head in our own layout.*python -m train.export .* format=vllm"),
        (hydra, "of family hydra.*lm and eagle3 drafts only"),
        (lambda _: "ngram", "of family ngram.*target.runtime=transformers"),
    ],
)
def test_drafts_that_vllm_does_not_write_with_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], str], said: str
) -> None:
    worker = proxy(tmp_path, monkeypatch)
    config_of(tmp_path)
    asked = ResponseDraftConfig(make(tmp_path))
    with pytest.raises(InputError, match=said):
        run(config_of(tmp_path, sampling=ResponseSampling(max_new_tokens=8, draft=asked)))
    assert not (tmp_path / "records").exists()
    assert not (worker / "asked.jsonl").exists()


def test_a_draft_on_several_cpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temperatures would be read from memory that nothing has written (vLLM issue 55005)."""
    worker = proxy(tmp_path, monkeypatch)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    config = drafted(tmp_path)
    config.target = replace(config.target, tensor_parallel_size=2)
    with pytest.raises(InputError, match="mended for one device alone"):
        run(config)
    assert not (worker / "asked.jsonl").exists()


def test_texts_of_other_records_are_read_and_none_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proxy(tmp_path, monkeypatch)
    run(config_of(tmp_path))
    (worker / "asked.jsonl").unlink()
    first = config_of(tmp_path)
    again = DistillConfig(
        target=first.target, responses="records", from_records=first.output_dir, records=first.records,
        batch_size=3, output_dir=str(tmp_path / "again"),
    )  # fmt: skip
    run(again)
    settings, *calls = asked(worker)
    assert settings["max_model_len"] == 15
    assert all("rows" in call for call in calls)
    ours, theirs = (read_json(tmp_path / name / "manifest.json") for name in ("records", "again"))
    assert ours["shards"] == theirs["shards"]


def test_what_was_written_before_a_run_ended_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as it reads; the run that goes on writes nothing anew, and ends as one that was not interrupted."""
    worker = proxy(tmp_path, monkeypatch)
    broken, whole = config_of(tmp_path, resume="auto"), config_of(tmp_path, "whole")
    (worker / "other_text").touch()
    with pytest.raises(RunError, match="would be that of another text"):
        run(broken)
    (worker / "other_text").unlink()
    (worker / "asked.jsonl").unlink()
    run(broken)
    assert not [line for line in asked(worker) if "prompts" in line]
    run(whole)
    ours, theirs = (read_json(tmp_path / name / "manifest.json") for name in ("records", "whole"))
    assert ours["shards"] == theirs["shards"]


def test_kept_responses_are_those_of_their_call(tmp_path: Path) -> None:
    calls: list[int] = []

    def sample(
        prompts: list[list[int]], rows: list[int], seed: int, on_response: OnResponse = ignored
    ) -> list[Response]:
        calls.append(seed)
        return [
            Response([seed, *prompt], "length" if row else "eos", 7 * row or None)
            for prompt, row in zip(prompts, rows, strict=True)
        ]

    kept = kept_responses(sample, tmp_path / "responses", 100)
    for seed in (1, 2, 1):
        assert kept([[70000, 9], []], [0, 1], seed) == [Response([seed, 70000, 9], "eos"), Response([seed], "length")]
    answer = kept([[9], []], [0, 1], 1)
    assert answer == [Response([1, 9], "eos"), Response([1], "length")]
    assert [one.passes for one in answer] == [None, 7]
    assert calls == [1, 2, 1]
    for file in (tmp_path / "responses").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match="writes these responses again"):
        kept([[9], []], [0, 1], 1)


def test_a_call_about_several_shards_is_kept_for_each(tmp_path: Path) -> None:
    """And asked again of the missing ones alone."""
    asked: list[list[int]] = []

    def sample(
        prompts: list[list[int]], rows: list[int], seed: int, on_response: OnResponse = ignored
    ) -> list[Response]:
        asked.append(rows)
        return [Response([row], "eos") for row in rows]

    kept, rows = kept_responses(sample, tmp_path / "responses", 3), [7, 2, 0, 5, 1, 6, 4]
    heard: list[tuple[int, int]] = []
    every = kept([[one] for one in rows], rows, 1, lambda place, one, _: heard.append((place, one.ids[0])))
    assert [one.ids[0] for one in every] == rows
    assert heard == list(enumerate(rows))
    for shard in ([2, 0, 1], [5, 4], [7, 6]):
        assert [one.ids[0] for one in kept([[one] for one in shard], shard, 1)] == shard
    assert asked == [rows]
    more = [8, 7, 2, 0, 1, 6]
    assert [one.ids[0] for one in kept([[one] for one in more], more, 1)] == more
    assert asked[1:] == [[8, 7, 6]], "a shard is whole or new"


def test_shards_are_put_together_into_calls() -> None:
    shards = [range(0, 4), range(4, 8), range(8, 12), range(16, 20), range(20, 22)]
    assert calls(shards, 8) == [range(0, 8), range(8, 12), range(16, 22)]
    assert calls(shards, 1) == shards


def test_the_rows_of_an_engine_are_busy() -> None:
    """64 rows that take the next prompt as a text ends, texts of log-normal lengths: the share of their steps that
    write. With a call for each shard of 32 prompts it is 0.10."""
    lengths = np.random.default_rng(0).lognormal(5, 1, 2048).clip(1, 2048).astype(int)

    def occupancy(parts: list[range]) -> float:
        steps = 0
        for part in parts:
            rows = [0] * 64
            for length in lengths[part.start : part.stop]:
                heapq.heapreplace(rows, rows[0] + int(length))
            steps += max(rows)
        return float(lengths.sum() / (64 * steps))

    shards = [range(first, first + 32) for first in range(0, 2048, 32)]
    assert occupancy(shards) < 0.2
    assert occupancy(calls(shards, CALL * 64)) > 0.75


def test_records_of_two_engines_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = proxy(tmp_path, monkeypatch)
    config = config_of(tmp_path, resume="auto")
    (worker / "die").touch()
    with pytest.raises(RunError):
        run(config)
    monkeypatch.setattr(vllm_runtime, "check_python", lambda *_: "0.other")
    with pytest.raises(InputError, match=r"0\.fake.*0\.other.*records of both would be mixed"):
        run(config)


SETTINGS = {"dtype": "float64", "device": "cpu", "device_map": "auto", "attn_implementation": "eager"}
FLAGS = ["trust_remote_code", "allow_missing"]


@pytest.mark.parametrize(("name", "value"), [*SETTINGS.items(), *((flag, True) for flag in FLAGS)])
def test_settings_of_transformers_alone_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"target\.{name}={value}.*target\.runtime=transformers"):
        build(TargetConfig, {"path": "some/target", "runtime": "vllm", name: value})
    build(TargetConfig, {"path": "some/target", name: value})


def latent(folder: Path) -> None:
    changed(save_tiny_target(folder), {"kv_lora_rank": 16})


def dynamic(folder: Path) -> None:
    changed(save_tiny_target(folder), {"rope_parameters": ROTATIONS[0][0]})


def olmo2(folder: Path) -> None:
    shape: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "eos_token_id": 0,
    }
    Olmo2ForCausalLM(Olmo2Config(**shape, num_attention_heads=2, num_key_value_heads=2)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}
ROTATIONS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 8, "than transformers; use target"),
    (LONG | {"original_max_position_embeddings": 32}, 33, "for 33 tokens: 32 at most, and texts of 31; use target"),
    (LONG | {"original_max_position_embeddings": 32}, 32, None),
    ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 33, None),
]


@pytest.mark.parametrize(("rope", "most", "told"), ROTATIONS)
def test_rotations_that_vllm_makes_otherwise_are_refused(
    tmp_path: Path, rope: dict[str, Any], most: int, told: str | None
) -> None:
    changed(save_tiny_target(tmp_path), {"rope_parameters": rope})
    target = describe_model(ModelConfig(path=str(tmp_path)))
    with pytest.raises(InputError, match=told) if told else nullcontext():
        check_rope(target, most)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (quantised, "is quantised, lm_head.weight as well"),
        (latent, r"latent attention \(MLA\)"),
        (dynamic, "has rope_type=dynamic, by which vLLM turns texts otherwise"),
        (olmo2, "olmo2 model.*granite, llama, mistral"),
    ],
)
def test_targets_that_the_engine_does_not_take_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], said: str
) -> None:
    worker = proxy(tmp_path, monkeypatch)
    make(tmp_path / "target")
    with pytest.raises(InputError, match=said):
        run(config_of(tmp_path, records=RecordsConfig()))
    assert not (tmp_path / "records").exists()
    assert not (worker / "asked.jsonl").exists()


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy(tmp_path, monkeypatch)
    config = config_of(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes"):
        open_runtime(config, describe_model(config.target))


def test_a_missing_environment_ends_with_2_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_target(tmp_path / "target")
    arguments = [f"target.path={tmp_path / 'target'}", "target.runtime=vllm", "target.vllm_python=nowhere/bin/python"]
    monkeypatch.setattr(sys, "argv", ["distill", *arguments, f"output_dir={tmp_path / 'records'}"])
    with pytest.raises(SystemExit) as error:
        cli.main()
    assert error.value.code == 2
    assert "scripts/vllm_env.sh" in capsys.readouterr().err
    assert not (tmp_path / "records").exists()


def test_quantised_layers_are_the_engine_s_own_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy(tmp_path, monkeypatch)
    quantised(tmp_path / "target", packed=None)
    run(config_of(tmp_path, records=RecordsConfig(["full"])))
    assert len(opened(tmp_path)) == 13


def test_what_a_large_target_needs_reaches_both_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that reads shares out each layer: vLLM gives no states of a pipeline."""
    worker = proxy(tmp_path, monkeypatch)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    config = config_of(tmp_path)
    config.target = replace(config.target, pipeline_parallel_size=2, quantization="fp8", gpu_memory_utilization=0.8)
    run(config)
    writing, reading = (line["options"] for line in asked(worker) if "target" in line)
    both = {"quantization": "fp8", "gpu_memory_utilization": 0.8}
    assert writing == both | {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    assert reading == both | {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}


@pytest.mark.parametrize(
    ("sizes", "there", "said"),
    [
        ({"tensor_parallel_size": 3}, 0, "3 does not share out the 2 attention heads"),
        ({"pipeline_parallel_size": 4}, 0, r"1 \(times pipeline_parallel_size=4 as it reads\)"),
        ({"tensor_parallel_size": 2}, 1, "ask for 2 devices, and here are 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], there: int, said: str
) -> None:
    worker = proxy(tmp_path, monkeypatch)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: there)
    config = config_of(tmp_path)
    config.target = replace(config.target, **sizes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        run(config)
    assert not (worker / "asked.jsonl").exists()
