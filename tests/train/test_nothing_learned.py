"""Batches in which nothing is learned: padding that fills up a rank's rows, prompts longer than a row. They count
nothing, and every weight still takes part, without which ranks would wait for each other's gradients or refuse."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, AutoTokenizer

from decode.common.errors import ConfigError, RunError
from decode.drafters.base import Batch
from decode.drafters.lm import LMDraft
from decode.drafters.saved_head import HEADS
from decode.models.describe import describe_model
from decode.models.output_head import ends_of, head_of
from distill.objectives.config import ObjectiveConfig
from distill.records.record_folder import RecordFolder
from distill.sequences import RecordSequences, TrainSequence, record_sequences
from tests.tiers import spread
from tests.tiny import tiny_llama
from tests.train.toy import head_config, metrics, model_config, tiny_config, write_records
from train import training_inputs
from train.batches import PADDING, PackedSource
from train.drafts.head_blueprint import head_blueprint
from train.engine import _free_port
from train.live_target import LiveTarget
from train.loss import DraftLoss
from train.metric_sums import Sums
from train.stage import run
from train.training_inputs import open_inputs

LENGTH = 32
PAIRS = {
    "head_tail": [("forward_kl", "none"), ("tv", "e2e_tv"), ("neg_log_alpha", "decay"), ("lk_hybrid", "dpace")],
    "topk": [("forward_kl", "first_failure")],
    "full": [("reverse_kl", "none"), ("mixture", "dpace")],
    "last_hidden": [("jsd", "decay")],
    "live": [("forward_kl", "none")],
    "text": [("cross_entropy", "none"), ("cross_entropy", "decay")],
}
"""Objective and credit of each place that p comes from: all of either kind, and none twice for its own sake."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in HEADS},
    "lilicorr": ("lilicorr", {"candidates": 2}),  # of 16 its lattice takes 45 s here
    "reduced vocabulary": ("eagle3", {"vocab": 100}),
    "prefix layer": ("hydra", {"prefix_attention": True}),
    "dflash": ("dspark", {"markov_rank": 0, "confidence": False, "layout": "fill_in"}),
}


@pytest.fixture(scope="module")
def every_store(tmp_path_factory: pytest.TempPathFactory, target: Path, corpus: Path) -> Path:
    stores = ["head_tail", "topk", "full", "last_hidden"]
    folder = tmp_path_factory.mktemp("records") / "every"
    return write_records(folder, target, corpus, stores, features={"layers": [0, 1, -1]})


@pytest.fixture(scope="module")
def text_records(tmp_path_factory: pytest.TempPathFactory, target: Path, corpus: Path) -> Path:
    """Hidden states without p."""
    folder = tmp_path_factory.mktemp("records") / "text"
    return write_records(folder, target, corpus, [], features={"layers": [0, 1, -1]})


class Prompts(RecordSequences):
    """The same texts, no token of which is learned."""

    def __getitem__(self, index: int) -> TrainSequence:
        known = super().__getitem__(index)
        payload = known.payload and {name: rows[:0] for name, rows in known.payload.items()}
        return replace(known, loss_mask=np.zeros_like(known.loss_mask), payload=payload)


class SomePrompts(Prompts):
    """Every other one of them."""

    def __getitem__(self, index: int) -> TrainSequence:
        return RecordSequences.__getitem__(self, index) if index % 2 else super().__getitem__(index)


def empty_batches(folder: Path, target: Any, p: str, layers: tuple[int, ...]) -> Iterator[Batch]:
    """Padding alone, and prompts alone."""
    records, store = RecordFolder.open(folder), None if p in ("live", "text") else p
    known = record_sequences(records, "train", LENGTH, store, layers)
    prompts = Prompts(records, known.indices, LENGTH, store, layers)
    for source, row in ((known, PADDING), (prompts, 0)):
        batch = PackedSource.of(source, LENGTH, 0, layers).batch([row], head_of(target))
        batch = batch if store else replace(batch, target=None)
        yield LiveTarget(target, layers)(batch) if p == "live" else batch


@pytest.mark.parametrize("name", spread(6, ["lm", *VARIANTS]))
def test_it_counts_nothing_and_every_weight_takes_part(target: Path, every_store: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(target)
    draft: Any = LMDraft(tiny_llama(300, 16, num_layers=1))
    if name != "lm":
        family, head = VARIANTS[name]
        cfg = head_config(Path("out"), target, family, data={"name": "python_stdlib"}, head=head)
        blueprint = head_blueprint(cfg, describe_model(model_config(target)), None)
        if blueprint.wants_vocab:
            blueprint = blueprint.with_vocab(torch.arange(blueprint.wants_vocab))
        draft = blueprint.build(ends_of(model)).module
    layers = () if name == "lm" else draft.config.taps
    for p, pairs in PAIRS.items():
        for batch in empty_batches(every_store, model, p, layers):
            for objective, credit in pairs:
                terms = {"jsd": 0.5, "cross_entropy": 0.5} if objective == "mixture" else {}
                config = ObjectiveConfig(name=objective, credit=credit, terms=terms, chunk_rows=16)  # type: ignore
                module = DraftLoss(draft, config, 4 if name in ("lm", "exit_adapter") else None)
                _check_counts_nothing(module, batch, f"{p} {objective} {credit}")


def _check_counts_nothing(module: DraftLoss, batch: Batch, where: str) -> None:
    module.train().zero_grad()
    loss, values = module(batch)
    loss.backward()
    with torch.no_grad():
        in_validation = module.eval()(batch)[1]
    tokens = float((batch.document >= 0).sum())
    assert float(loss.detach()) == 0.0, where
    for each in (values, in_validation):
        assert Sums.from_tensor(each) == Sums(tokens=tokens), where
    gradients = {name: weight.grad for name, weight in module.named_parameters() if weight.requires_grad}
    assert [name for name, gradient in gradients.items() if gradient is None] == [], where
    assert [name for name, gradient in gradients.items() if gradient is not None and gradient.any()] == [], where


def test_rows_shorter_than_a_window_count_nothing(target: Path) -> None:
    """Of texts that are, a draft model's credit finds no round."""
    nothing = torch.zeros(1, 3, dtype=torch.long)
    batch = LiveTarget(AutoModelForCausalLM.from_pretrained(target))(
        Batch(nothing, nothing, nothing, torch.ones(1, 3, dtype=torch.bool))
    )
    loss, values = DraftLoss(LMDraft(tiny_llama(300, 16)), ObjectiveConfig(credit="decay"), 4)(batch)
    loss.backward()
    assert (float(loss.detach()), Sums.from_tensor(values).loss_count) == (0.0, 0.0)


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED = "def return import class self value if else for in range None"


@pytest.fixture
def chats(tmp_path: Path, target: Path) -> Path:
    """A target with a chat template, and beside it chats: every other question is as long as a row of 48 tokens."""
    folder = shutil.copytree(target, tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    rows = []
    for number in range(24):
        question = f"{number} {ASKED * (number % 2)}"
        rows.append([{"role": "user", "content": question}, {"role": "assistant", "content": "yield with"}])
    lines = [json.dumps({"messages": messages}) for messages in rows]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def chat_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    data = {"name": "jsonl", "path": str(folder / "chats.jsonl"), "validation_share": 0.3, "heldout_share": 0.1}
    return {"data": data, "target_source": "live", "sequence_length": 48, "batch_size": 1, **changes}


def test_a_run_goes_on_over_prompts_longer_than_its_rows(chats: Path) -> None:
    run(tiny_config(chats / "out", chats / "target", **chat_settings(chats), log_every=1, validation_rows=9))
    losses = [line["loss"] for line in metrics(chats / "out", "train")]
    assert len(losses) == 6
    assert None in losses
    assert any(loss is not None for loss in losses)
    assert metrics(chats / "out", "validation")[-1]["loss"] > 0


@pytest.mark.parametrize("family", ["lm", "eagle3"])
def test_rows_that_end_before_all_answers_are_refused(chats: Path, family: str) -> None:
    """Before any weight is loaded."""
    settings = chat_settings(chats, sequence_length=6)
    make: Any = tiny_config if family == "lm" else head_config
    with pytest.raises(ConfigError, match="no token of the training split is to be learned: sequence_length=6 cuts"):
        open_inputs(make(chats / "out", chats / "target", **settings))


def test_a_validation_of_unlearned_rows_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch, target: Path, records: Path
) -> None:
    def sources(folder: RecordFolder, split: str, *rest: Any) -> RecordSequences:
        known = record_sequences(folder, split, *rest)
        return Prompts(folder, known.indices, *rest) if split == "validation" else known

    monkeypatch.setattr("train.training_inputs.record_sequences", sources)
    with pytest.raises(ConfigError, match="no token of the 4 validation rows is to be learned"):
        open_inputs(tiny_config(Path("out"), target, records=str(records)))


def test_a_validation_that_counts_nothing_ends_the_run() -> None:
    """What no plan knows: which tokens a family can draft."""
    with pytest.raises(RunError, match="the validation counted no token.*longer sequence_length"):
        Sums(tokens=12.0).score()


@pytest.mark.parametrize(("length", "longest"), [(32, 24), (16, 16)])
def test_a_window_longer_than_every_text_is_refused(target: Path, records: Path, length: int, longest: int) -> None:
    """Of 8 tokens that were given and 16 that the target wrote, as far as a row holds them."""
    settings: dict[str, Any] = {"records": str(records), "sequence_length": length, "objective": {"credit": "decay"}}
    with pytest.raises(ConfigError, match=rf"no text \(of {longest} tokens .*={length}\) .* window={longest}"):
        open_inputs(tiny_config(Path("out"), target, **settings, window=longest))
    assert open_inputs(tiny_config(Path("out"), target, **settings, window=longest - 1))


def test_records_of_text_alone_do_not_say_what_was_accepted(target: Path, text_records: Path) -> None:
    learned = {"name": "cross_entropy", "credit": "dpace"}
    with pytest.raises(ConfigError, match="credit=dpace asks .* hold text alone"):
        open_inputs(tiny_config(Path("out"), target, records=str(text_records), objective=learned))


def test_a_chance_that_nothing_trains_is_not_predicted(tmp_path: Path, target: Path, text_records: Path) -> None:
    """DSpark on hidden states without p: an untrained chance would cut drafts."""
    settings: dict[str, Any] = {"records": str(text_records), "objective": {"name": "cross_entropy"}}
    for source, predicts in (("records", False), ("live", True)):
        cfg = head_config(tmp_path / "out", target, "dspark", **settings | {"target_source": source})
        assert cast(Any, open_inputs(cfg).blueprint).config.confidence == predicts


def on_a_rank(rank: int, port: int, target: str, folders: dict[str, str], output_dir: str) -> None:
    """Trains every family on a row a rank and step, half of which teach nothing, and validates on three rows, after
    which one rank has none left."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def sources(folder: RecordFolder, split: str, *rest: Any) -> RecordSequences:
        kind = SomePrompts if split == "train" else RecordSequences
        return kind(folder, record_sequences(folder, split, *rest).indices, *rest)

    training_inputs.record_sequences = sources
    Accelerator.end_training = lambda self: None  # the next run goes on in the same process group
    settings: dict[str, Any] = {"engine": {"name": "ddp"}, "batch_size": 1, "steps": 4, "validation_rows": 3}
    text = {"records": folders["text"], "objective": {"name": "cross_entropy"}}
    for family in ("lm", *HEADS):
        make: Any = tiny_config if family == "lm" else partial(head_config, family=family)
        for name, source in ((family, {"records": folders["p"]}), (f"{family}_text", text)):
            run(make(Path(output_dir) / name, Path(target), **settings | source))


@pytest.mark.slow
def test_every_family_trains_on_two_ranks_of_which_one_has_nothing(
    tmp_path: Path, target: Path, every_store: Path, text_records: Path
) -> None:
    folders = {"p": str(every_store), "text": str(text_records)}
    spawn(on_a_rank, (_free_port(), str(target), folders, str(tmp_path)), nprocs=2)
    for family in ("lm", *HEADS):
        for folder in (family, f"{family}_text"):
            assert [line["loss"] > 0 for line in metrics(tmp_path / folder, "validation")] == [True, True]
            for checkpoint in (tmp_path / folder / "checkpoints").glob("step_*"):  # both wrote into the same folder
                assert len([*checkpoint.glob("random_states_*.pkl")]) == 2
