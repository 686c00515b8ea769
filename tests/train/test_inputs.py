"""Inputs that do not fit are refused before any weight is loaded; a live target says what it says of a text alone."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from decode.common.errors import ConfigError, UserError
from decode.config import ModelConfig
from decode.drafters.base import Batch
from decode.models.describe import describe_model
from distill.corpora.configured import load_corpus
from distill.corpora.corpus import Corpus
from distill.objectives.target_distribution import Dense
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.train.toy import (
    data_settings,
    head_config,
    model_config,
    save_target,
    text_data,
    tiny_config,
    write_records,
)
from train import stage, training_inputs
from train.config import TokenizerConfig
from train.drafts.draft_config import DraftConfig
from train.drafts.head_blueprint import HeadBlueprint
from train.drafts.lm_blueprint import LMBlueprint
from train.live_target import LiveTarget
from train.training_inputs import Inputs, _choose_store, check_enough, open_inputs, special_tokens
from train.training_plan import TrainingPlan

SPLITS = ("train", "validation", "heldout")


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a configuration that must be refused with this message."""

    def no_weights(*_: object) -> None:
        raise AssertionError("weights were about to be loaded")

    monkeypatch.setattr(stage, "build_compute", no_weights)
    monkeypatch.setattr(stage, "build_accelerator", no_weights)

    def check(target: Path | None, message: str, **changes: Any) -> None:
        with pytest.raises(UserError, match=message):
            stage.run(tiny_config(tmp_path / "out", target, **changes))
        assert not (tmp_path / "out").exists()

    return check


def test_records_of_another_target(refuse, tmp_path: Path, records: Path) -> None:
    refuse(save_target(tmp_path / "other", seed=1), "other weights", records=str(records))


def test_a_draft_over_another_vocabulary(refuse, tmp_path: Path, target: Path, records: Path) -> None:
    other = save_target(tmp_path / "other", vocab_size=320)
    refuse(target, "320 vocabulary entries.*300", records=str(records), draft={"init_from": str(other)})


def test_a_draft_over_other_tokens_of_the_same_number(refuse, tmp_path: Path, target: Path, records: Path) -> None:
    other = shutil.copytree(target, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token, number in vocabulary.items() if number in (298, 299)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    refuse(target, "tokenizers differ", records=str(records), draft={"init_from": str(other)})


@pytest.mark.parametrize("objective", ["reverse_kl", "jsd"])
def test_sparse_records_for_an_objective_that_needs_all_of_p(
    refuse, target: Path, records: Path, objective: str
) -> None:
    refuse(target, "these records are sparse", records=str(records), objective={"name": objective})


def test_a_truncated_shard(refuse, tmp_path: Path, target: Path, records: Path) -> None:
    cut = shutil.copytree(records, tmp_path / "cut")
    shard = next(cut.glob("shards/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    refuse(target, "cut short", records=str(cut))


def test_sequences_longer_than_the_context(refuse, target: Path, records: Path) -> None:
    refuse(target, "longer than the target's context, 256", records=str(records), sequence_length=257)
    draft = {"max_positions": 16}
    refuse(target, "longer than draft.max_positions, 16", records=str(records), draft=draft)


def test_too_little_text_for_one_step(refuse, target: Path, records: Path) -> None:
    refuse(target, "one step takes 4000", records=str(records), batch_size=4000)


def test_missing_paths(refuse, tmp_path: Path, target: Path, records: Path) -> None:
    refuse(tmp_path / "none", "does not exist", records=str(records))
    refuse(target, "no such record folder", records=str(tmp_path / "none"))
    refuse(target, "does not exist", records=str(records), draft={"init_from": str(tmp_path / "none")})
    missing = data_settings(tmp_path / "none")
    refuse(target, "none", data=missing, target_source="live")


def test_the_folder_of_a_run_stands_for_its_model(tmp_path: Path, target: Path, records: Path) -> None:
    """As target, as draft to start from, and for its tokenizer."""
    run = tmp_path / "run"
    shutil.copytree(target, run / "model")
    cfg = tiny_config(tmp_path / "out", run, records=str(records), draft={"init_from": str(run)}, steps=2)
    assert (cfg.target.path, cfg.draft.init_from) == (str(run / "model"), str(run / "model"))
    stage.run(cfg)
    assert (tmp_path / "out" / "model" / "config.json").is_file()
    assert TokenizerConfig(path=str(run)).path == str(run / "model")
    assert ModelConfig(path=str(run / "model")).path == str(run / "model")
    assert ModelConfig(path="Qwen/Qwen3-8B").path == "Qwen/Qwen3-8B"


def test_the_folder_of_a_run_that_is_not_finished(refuse, tmp_path: Path, target: Path, records: Path) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "run.json").write_text("{}")
    refuse(tmp_path / "killed", "run without a model in model/.*resume=auto", records=str(records))
    init_from = {"init_from": str(tmp_path / "killed")}
    refuse(target, "run without a model in model/.*resume=auto", records=str(records), draft=init_from)


def test_a_checkpoint_of_another_draft(tmp_path: Path, target: Path, records: Path) -> None:
    stage.run(tiny_config(tmp_path / "first", target, records=str(records)))
    changes = {"records": str(records), "resume": str(tmp_path / "first")}
    with pytest.raises(UserError, match="was made with draft="):
        stage.run(tiny_config(tmp_path / "out", target, **changes, draft={"width": 32}))
    with pytest.raises(UserError, match="has done 6 steps, and steps=6 counts these.*Use steps=12"):
        stage.run(tiny_config(tmp_path / "out", target, **changes))


@pytest.mark.parametrize("source", ["texts", "records", "target"])
def test_what_an_unfinished_run_has_learned_from_is_as_it_was(
    tmp_path: Path, target: Path, corpus: Path, records: Path, source: str
) -> None:
    """Under the same paths: texts that grew, records that were made anew, a target that was replaced."""
    own = {"texts": corpus, "records": records, "target": target}[source]
    own = Path(shutil.copytree(own, tmp_path / "own"))
    live = {"data": data_settings(own if source == "texts" else corpus), "target_source": "live"}
    changes: dict[str, Any] = {"records": str(own)} if source == "records" else live
    cfg = tiny_config(tmp_path / "out", own if source == "target" else target, **changes)
    stage.run(cfg)
    (tmp_path / "out" / "manifest.json").unlink()
    cfg.resume = "auto"
    stage.run(cfg)
    (tmp_path / "out" / "manifest.json").unlink()
    if source == "texts":
        (own / "more.txt").write_text("one more text that is long enough to be learned from\n" * 9)
    elif source == "records":
        manifest = own / "manifest.json"
        manifest.write_text(manifest.read_text() + "\n")
    else:
        save_target(own, seed=1)
    what = "target_weights" if source == "target" else "data_hash"
    with pytest.raises(UserError, match=rf"was begun with {what} .* the files under their path changed"):
        stage.run(cfg)


@pytest.mark.parametrize("kept", ["float32", "bfloat16"])
@pytest.mark.parametrize("loaded", ["float32", "bfloat16"])
def test_recorded_states_become_p_in_the_precision_of_the_target_that_is_loaded(
    tmp_path: Path, target: Path, corpus: Path, kept: str, loaded: str
) -> None:
    records = write_records(tmp_path / "records", target, corpus, ["last_hidden"], dtype=kept)
    cfg = tiny_config(tmp_path / "out", target, records=str(records), steps=2)
    stage.run(replace(cfg, target=replace(cfg.target, dtype=loaded)))


def test_an_unfinished_run_of_another_configuration(tmp_path: Path, target: Path, records: Path) -> None:
    stage.run(tiny_config(tmp_path / "out", target, records=str(records)))
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(UserError, match="lr: 0.01 there, 0.5 now"):
        stage.run(tiny_config(tmp_path / "out", target, records=str(records), lr=0.5, resume="auto"))


def texts_of(source: Any) -> set[str]:
    return {source[index].document for index in range(len(source))}


def test_what_is_validated_on_is_not_trained_on(corpus: Path, target: Path) -> None:
    """A draft that knows its validation by heart would be kept for it."""
    cfg = tiny_config(Path("out"), target, data=data_settings(corpus), target_source="live")
    found = open_inputs(cfg)
    splits = {split: {one.id for one in load_corpus(text_data(corpus)).documents(split)} for split in SPLITS}
    assert texts_of(found.train.source) == splits["train"]
    assert texts_of(found.validation.source) == splits["validation"]
    assert not splits["train"] & splits["validation"]


def test_recorded_hidden_states_come_with_their_rows(target: Path, feature_records: Path) -> None:
    """Those that the draft reads, in its order; a live target makes them itself."""
    given: dict[str, Any] = {"records": str(feature_records), "head": {"taps": [0, -1]}}
    found = open_inputs(head_config(Path("out"), target, **given))
    assert found.train.layers == found.validation.layers == (0, -1)
    assert open_inputs(head_config(Path("out"), target, **given, target_source="live")).train.layers == ()


def test_a_draft_vocabulary_is_counted_on_the_training_texts(target: Path, corpus: Path) -> None:
    """Two special tokens, and the thirty that are learned most often; the validation's texts would say others."""
    found = open_inputs(head_config(Path("out"), target, data=data_settings(corpus), head={"vocab": 32}))
    often = {}
    for split, packed in (("train", found.train), ("validation", found.validation)):
        sequences = (packed.source[index] for index in range(len(packed.source)))
        counts = Counter(token for one in sequences for token in one.ids[1:].tolist() if token > 1)
        often[split] = [0, 1, *sorted(sorted(counts), key=lambda token: -counts[token])[:30]]
    assert isinstance(found.blueprint, HeadBlueprint)
    assert found.blueprint.vocab is not None
    assert found.blueprint.vocab.tolist() == sorted(often["train"]) != sorted(often["validation"])
    learned = [found.train.source[index].ids[1:length] for index, length in enumerate(found.train.source.lengths)]
    ids = np.concatenate(learned)
    assert found.covered == pytest.approx(np.isin(ids, often["train"]).mean())
    assert found.widest_row(makes_p=True) == found.vocab_size  # a row of p
    assert replace(found, store="head_tail").widest_row(makes_p=False) == 32
    with pytest.raises(ConfigError, match=r"vocab=4 holds .*% of the learned tokens.* null, which drafts every token"):
        open_inputs(head_config(Path("out"), target, data=data_settings(corpus), head={"vocab": 4}))


def test_a_tokenizer_is_trained_on_the_training_texts(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def train(texts: Any, entries: int) -> Any:
        seen.extend(texts)
        return tiny_tokenizer(entries)

    monkeypatch.setattr("train.training_inputs.train_bpe", train)
    own: dict[str, Any] = {"tokenizer": {"train_entries": 300}, "objective": {"name": "cross_entropy"}}
    open_inputs(tiny_config(Path("out"), None, data=data_settings(corpus), **own))
    assert seen == [one.text for one in load_corpus(text_data(corpus)).documents("train")]


def test_of_several_processes_one_reads_the_corpus(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read and tokenised all of it, 4 GB at the peak for 300,000 chats."""
    own: dict[str, Any] = {"tokenizer": {"train_entries": 300}, "objective": {"name": "cross_entropy"}}
    cfg, shared = tiny_config(Path("out"), None, data=data_settings(corpus), **own), list[bytes]()

    def first(_: bool, do: Callable[[], Any]) -> Any:
        shared.append(pickle.dumps(do()))
        return pickle.loads(shared[-1])

    def other(_: bool, do: object) -> Any:
        return pickle.loads(shared.pop(0))

    def no_reading(_: Corpus) -> None:
        raise AssertionError("the corpus was read again")

    monkeypatch.setattr(training_inputs, "on_main", first)
    ours = open_inputs(cfg)
    monkeypatch.setattr(training_inputs, "on_main", other)
    monkeypatch.setattr(Corpus, "everything", no_reading)
    theirs = open_inputs(cfg)
    assert not shared
    assert (ours.held_out, ours.bad_rows) == (theirs.held_out, theirs.bad_rows)
    assert ours.tokenizer.get_vocab() == theirs.tokenizer.get_vocab()
    for one, another in ((ours.train, theirs.train), (ours.validation, theirs.validation)):
        assert one.rows == another.rows
        assert torch.equal(one.batch(range(len(one.rows))).ids, another.batch(range(len(one.rows))).ids)


def test_a_step_is_of_the_rows_of_all_ranks_and_micro_steps(target: Path, corpus: Path) -> None:
    given: dict[str, Any] = {"data": data_settings(corpus), "target_source": "live"}
    cfg = tiny_config(Path("out"), target, **given, batch_size=2, gradient_accumulation=3)
    found = open_inputs(cfg)
    assert check_enough(cfg, found, world_size=2) == 12
    too_many = len(found.train.rows) // 6 + 1
    with pytest.raises(UserError, match=f"one step takes {6 * too_many} .*x {too_many} processes"):
        check_enough(cfg, found, world_size=too_many)
    assert check_enough(cfg, found, world_size=too_many - 1) == 6 * (too_many - 1)


def test_a_sequence_may_fill_the_context(target: Path, corpus: Path) -> None:
    """256 tokens of 256; one more is refused above."""
    given: dict[str, Any] = {"data": data_settings(corpus), "target_source": "live"}
    assert open_inputs(tiny_config(Path("out"), target, **given, sequence_length=256)).train.length == 256


@pytest.mark.parametrize(
    ("objective", "stores", "chosen"),
    [
        ("reverse_kl", ["head_tail", "last_hidden"], "last_hidden"),
        ("forward_kl", ["head_tail", "last_hidden"], "head_tail"),
        ("cross_entropy", ["head_tail"], "head_tail"),
    ],
)
def test_an_objective_reads_the_store_that_is_enough_for_it(objective: str, stores: list[str], chosen: str) -> None:
    cfg = tiny_config(Path("out"), Path("target"), records="r", objective={"name": objective})
    records: Any = SimpleNamespace(layout=SimpleNamespace(store=stores))
    assert _choose_store(cfg, records) == chosen


def test_every_end_of_text_is_always_in_a_draft_vocabulary(tmp_path: Path, target: Path) -> None:
    """Those of the generation config, with the tokenizer's special tokens (0 and 1)."""
    folder = shutil.copytree(target, tmp_path / "target")
    GenerationConfig(eos_token_id=[7, 9, 299]).save_pretrained(folder)
    assert special_tokens(describe_model(model_config(folder)), tiny_tokenizer()) == {0, 1, 7, 9, 299}
    GenerationConfig(eos_token_id=7).save_pretrained(folder)
    assert special_tokens(describe_model(model_config(folder)), tiny_tokenizer()) == {0, 1, 7}
    (folder / "generation_config.json").unlink()
    assert special_tokens(describe_model(model_config(folder)), tiny_tokenizer()) == {0, 1}


def test_how_many_tokens_a_round_has() -> None:
    """What a head unrolls, and for a draft model what was asked for."""
    for depth, tokens, along_rows in ((3, 3, None), (None, 5, 5)):
        blueprint: Any = SimpleNamespace(depth=depth)
        nothing: Any = None
        found = Inputs(nothing, nothing, blueprint, nothing, nothing, None, None, window=5)
        assert (found.num_draft_tokens, found.window_along_rows) == (tokens, along_rows)


def test_a_plan_is_worked_out_of_what_a_step_reads(target: Path, corpus: Path) -> None:
    """5 steps of 4 rows; a checkpoint holds a weight and its two averages, 12 bytes."""
    given: dict[str, Any] = {"data": data_settings(corpus), "target_source": "live", "keep_checkpoints": 2}
    cfg = tiny_config(Path("out"), target, **given, steps=5)
    found = open_inputs(cfg)
    plan = TrainingPlan.of(cfg, found, rows_per_step=4)
    rows, tokens = len(found.train.rows), sum(found.train.source.lengths)
    weights = 300 * 16 + 4 * 16 * 16 + 3 * 16 * 64 + 3 * 16
    assert (plan.steps, plan.draft_parameters, plan.checkpoint_bytes) == (5, weights, 12 * weights)
    assert plan.epochs == pytest.approx(20 / rows)
    assert plan.tokens == pytest.approx(20 * tokens / rows, abs=1)
    assert plan.disk_bytes == 3 * 12 * weights + 3 * 4 * weights
    assert plan.lines()[0].startswith("5 steps, ")
    assert plan.trained_parameters == weights
    assert plan.cost == pytest.approx(weights / (found.target.num_parameters - 300 * 32))  # type: ignore[union-attr]
    assert "0.0% of the 250,000,000" in plan.advice()[0]
    assert not replace(plan, tokens=25_000_000).advice()
    assert not replace(plan, target_parameters=None).advice()  # a target of one's own


def test_a_head_or_an_adapter_in_place_of_a_model(refuse, tmp_path: Path, target: Path, records: Path) -> None:
    for name, files, words in (
        ("head", ("config.json", "draftsmith.json"), "holds a head, .* a language model is wanted here"),
        ("adapter", ("adapter_config.json",), "holds an adapter alone .*merge_and_unload"),
    ):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text('{"family": "mtp"}')
        refuse(target, words, records=str(records), draft={"init_from": str(tmp_path / name)})


def test_a_plan_warns_of_what_cannot_be_mended_later(
    target: Path, corpus: Path, records: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A draft that is dear beside its target, and too little held out; with records it is they who know."""
    given: dict[str, Any] = {"data": data_settings(corpus), "target_source": "live"}
    cfg = tiny_config(Path("out"), target, **given)
    of_text, of_records = open_inputs(cfg), open_inputs(tiny_config(Path("out"), target, records=str(records)))
    assert of_text.held_out == of_records.held_out
    plan = TrainingPlan.of(cfg, of_text, rows_per_step=2)
    assert any(line.startswith("held out: 1 documents, ") for line in plan.lines())
    assert ["of the 96 held-out prompts" in one for one in plan.warnings()] == [True]
    again = tiny_config(Path("out"), target, records=str(records))
    of_the_same = TrainingPlan.of(again, of_records, rows_per_step=2)
    assert of_the_same.lines()[3] == plan.lines()[3]
    assert not of_the_same.warnings()  # distill has said it, while shares could be changed
    enough = replace(plan, few_held_out=None)
    assert not enough.warnings()
    assert not replace(enough, cost=1 / 3).warnings()
    assert "reads 40% of the weights" in replace(enough, cost=0.4).warnings()[0]
    assert not replace(enough, cost=None, target_parameters=None).warnings()
    assert not replace(enough, vocab=32, covered=0.9).warnings()
    few = replace(enough, vocab=32, covered=0.89)
    assert "draft.head.vocab=32 holds 89.0% of the tokens" in few.warnings()[0]
    assert "draft vocabulary: 32 tokens, 89.0% of those that are learned" in few.lines()
    stage.run(tiny_config(Path("out"), target, **given, plan=True, draft={"width": 64}))
    assert "a draft hardly pays" in caplog.text


def test_checkpoints_of_adapters_are_as_large_as_planned(tmp_path: Path, target: Path, records: Path) -> None:
    """The whole draft's weights, and the moments of the adapters alone."""
    lora = {"rank": 2, "targets": ["q_proj"]}
    cfg = tiny_config(tmp_path / "out", target, records=str(records), draft={"init_from": str(target), "lora": lora})
    plan = TrainingPlan.of(cfg, open_inputs(cfg), rows_per_step=2)
    stage.run(cfg)
    newest = max((tmp_path / "out" / "checkpoints").glob("step_*"))
    assert plan.trained_parameters == 2 * 2 * (2 * 32 + 32 * 2) // 2
    written = sum(file.stat().st_size for file in newest.glob("*") if file.suffix in (".safetensors", ".bin"))
    assert plan.checkpoint_bytes < written < plan.checkpoint_bytes + 16_000  # headers; unplanned moments are 300 kB


def test_a_pretrained_draft_is_loaded_in_the_revision_of_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(source: ModelConfig, role: str) -> LlamaForCausalLM:
        asked.append((source.path, source.revision, role))
        return tiny_llama().requires_grad_(False)

    monkeypatch.setattr("decode.drafters.lm.load_model", load)
    built = LMBlueprint(DraftConfig(init_from="some/draft", revision="v2"), tiny_llama().config).build()
    assert asked == [("some/draft", "v2", "draft.init_from")]
    assert all(weight.requires_grad for weight in built.module.parameters())


TEXTS = ([5, 9, 2, 7, 1], [3, 3, 8])


def two_texts() -> Batch:
    """In one row, with padding behind them."""
    ids = torch.tensor([[*TEXTS[0], *TEXTS[1], 0]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0]])
    document = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, -1]])
    return Batch(ids, positions, document, document >= 0)


def test_rows_hold_p_of_the_token_after_them_whatever_lies_before_their_text() -> None:
    model = tiny_llama(16, 16, dtype=torch.float64)
    batch = LiveTarget(model)(two_texts())
    assert batch.features is None
    assert batch.target is not None
    distribution = batch.target.chunk(torch.arange(8))
    assert isinstance(distribution, Dense)
    assert not distribution.log_p.requires_grad
    with torch.no_grad():
        alone = [model(torch.tensor([ids])).logits[0] for ids in TEXTS]
    torch.testing.assert_close(distribution.log_p, torch.cat(alone).float().log_softmax(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layers", [(0, 1, -1), (-1, 0)])
def test_hidden_states_come_in_the_order_of_the_layers(layers: tuple[int, ...]) -> None:
    """0 is the embedding, 1 the first layer's output, -1 the final state, from which the head makes logits."""
    model = tiny_llama(16, 16, dtype=torch.float64)
    batch = LiveTarget(model, layers)(two_texts())
    assert batch.features is not None
    assert batch.features.shape == (1, 9, len(layers), 16)
    with torch.no_grad():
        for text, place in zip(TEXTS, (slice(0, 5), slice(5, 8)), strict=True):
            out = model(torch.tensor([text]), output_hidden_states=True)
            known = {0: out.hidden_states[0], 1: out.hidden_states[1], -1: out.hidden_states[-1]}
            for number, tap in enumerate(layers):
                torch.testing.assert_close(batch.features[:, place, number], known[tap])
            final = batch.features[:, place, layers.index(-1)]
            torch.testing.assert_close(model.lm_head(final), out.logits)
