"""Heads go through the same loop as draft models: live or from records, resumed, exported, continued; what they learn
by heart they draft."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from decode import generate, load_drafter
from decode.common.errors import ConfigError, UserError
from decode.common.run_folder import sha256_file
from decode.config import ModelConfig
from decode.drafters.head_draft import HeadDraft
from decode.drafters.saved_head import HEADS
from decode.models.describe import describe_model
from distill.objectives.config import ObjectiveConfig
from tests.tiers import by_default
from tests.tiny import save_tiny_target, tiny_tokenizer
from tests.train.overfit import NEW_TOKENS, PROMPT, built_head, one_document, overfit
from tests.train.toy import data_settings, head_config, metrics, save_target, tiny_config
from train import stage
from train.drafts.head_blueprint import TrainableHead, default_taps, head_blueprint
from train.live_target import LiveTarget
from train.loss import DraftLoss
from train.metric_sums import Sums
from train.optimizers import build_optimizers
from train.stage import run

TEXT = {"name": "python_stdlib"}


@pytest.mark.parametrize("family", by_default(2, HEADS))
def test_a_head_learns_and_drafts(tmp_path: Path, target: Path, corpus: Path, family: str) -> None:
    run(head_config(tmp_path / "out", target, family, data=data_settings(corpus), steps=8, validate_every=8))
    lines = metrics(tmp_path / "out", "train")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["alpha"] > lines[0]["alpha"]
    model, ids = AutoModelForCausalLM.from_pretrained(target), torch.arange(10, 18)[None]
    drafter = load_drafter(tmp_path / "out", target=model)
    settings: dict[str, Any] = {"max_new_tokens": 96, "eos_token_id": ()}
    drafted = generate(model, drafter, ids, num_draft_tokens=3, **settings, seed=0)
    assert torch.equal(drafted.sequences, generate(model, None, ids, **settings, seed=0).sequences)
    assert drafted.stats.tau > 1.7  # 2.04 to 2.40 by family; 1.0 where the draft's noise is another token's


@pytest.mark.parametrize(
    "family", ["eagle3", *(pytest.param(f, marks=pytest.mark.slow) for f in HEADS if f != "eagle3")]
)
def test_recorded_hidden_states_train_as_live_ones(
    tmp_path: Path, target: Path, feature_records: Path, family: str
) -> None:
    given: dict[str, Any] = {"records": str(feature_records), "objective": {"name": "tv"}, "steps": 4}
    run(head_config(tmp_path / "stored", target, family, **given))
    run(head_config(tmp_path / "live", target, family, **given, target_source="live"))
    stored, live = (metrics(tmp_path / name, "train") for name in ("stored", "live"))
    for ours, theirs in zip(stored, live, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-2)  # bfloat16 states, float16 distributions
        assert ours["alpha"] == pytest.approx(theirs["alpha"], rel=1e-2)
    model = AutoModelForCausalLM.from_pretrained(target)
    for name in ("stored", "live"):  # records say which weights made them
        load_drafter(tmp_path / name, target=model)
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.q_proj.weight").mul_(1.1)
    for name in ("stored", "live"):
        with pytest.raises(UserError, match="changed after they were loaded"):
            load_drafter(tmp_path / name, target=model)
        assert ours["tau"] == pytest.approx(theirs["tau"], rel=2e-2)


@pytest.mark.parametrize("family", by_default(6, HEADS))
@pytest.mark.parametrize("weights", by_default(1, [torch.bfloat16, torch.float32]))  # the second as under ZeRO
def test_half_precision_stays_close(target: Path, family: str, weights: torch.dtype) -> None:
    known = built_head(target, family)
    batch = LiveTarget(known.target, known.head.config.taps)(one_document(torch.arange(20, 44)[None]))
    module = DraftLoss(known.head, ObjectiveConfig(credit="decay"), None)
    exact = Sums.from_tensor(module(batch)[1]).means()
    module.to(weights)
    assert batch.features is not None
    batch = replace(batch, features=batch.features.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        loss, values = module(batch)
    loss.backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in module.parameters())
    mixed = Sums.from_tensor(values).means()
    for name in ("loss", "alpha", "tau"):
        assert mixed[name] == pytest.approx(exact[name], rel=5e-2), name


def test_the_targets_ends_are_never_kept(tmp_path: Path, target: Path, corpus: Path) -> None:
    """Neither in checkpoints nor in the export: they are the target's, and as large as all of a head."""
    run(head_config(tmp_path / "out", target, data=data_settings(corpus), optimizer="adamw"))
    folder = tmp_path / "out"
    ends = {
        name: load_file(target / "model.safetensors")[name] for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    kept = {
        "export": load_file(folder / "model" / "model.safetensors"),
        "best": load_file(next(folder.glob("checkpoints/best_*/model.safetensors"))),
        "checkpoint": load_file(folder / "checkpoints" / "step_00000006" / "model.safetensors"),
    }
    count = json.loads((folder / "result.json").read_text())["num_parameters"]
    for what, weights in kept.items():
        assert sum(weight.numel() for weight in weights.values()) == count, what
        assert not any(torch.equal(end, weight) for end in ends.values() for weight in weights.values()), what
        assert not any(300 in weight.shape for weight in weights.values()), what  # entries of the vocabulary
    optimizer = torch.load(folder / "checkpoints" / "step_00000006" / "optimizer.bin", weights_only=True)
    states = optimizer["state"].values()
    assert sum(state["exp_avg"].numel() for state in states) == count


def test_a_resumed_head_equals_an_uninterrupted_one(tmp_path: Path, target: Path, feature_records: Path) -> None:
    changes: dict[str, Any] = {"records": str(feature_records), "keep_checkpoints": 9, "head": {"vocab": 200}}
    run(head_config(tmp_path / "whole", target, **changes))
    source = tmp_path / "whole" / "checkpoints" / "step_00000003"
    run(head_config(tmp_path / "rest", target, **changes, resume=str(source)))
    whole, rest = (metrics(tmp_path / name) for name in ("whole", "rest"))
    assert [line["loss"] for line in whole] == [line["loss"] for line in rest]
    whole, rest = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "rest"))
    assert whole == rest


def test_the_exported_folder_says_what_it_is(tmp_path: Path, target: Path, corpus: Path) -> None:
    run(head_config(tmp_path / "out", target, data=data_settings(corpus), export_dtype="bfloat16"))
    folder = tmp_path / "out" / "model"
    assert {path.name for path in folder.iterdir()} == {
        "README.md", "config.json", "draftsmith.json", "model.safetensors",
    }  # fmt: skip
    provenance = json.loads((folder / "draftsmith.json").read_text())
    assert provenance["family"] == "eagle3"
    assert provenance["target"].keys() == {
        "path", "fingerprint", "vocab_size", "token_map_hash", "chat_template_hash", "quantization", "weights",
    }  # fmt: skip
    assert provenance["measured"]["alpha"] > 0
    assert all(sha256_file(folder / name) == known for name, known in provenance["sha256"].items())
    config = json.loads((folder / "config.json").read_text())
    assert (config["taps"], config["depth"], config["hidden_size"], config["heads"]) == ([0, 1, -1], 3, 32, 2)
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    card = (folder / "README.md").read_text()
    assert "# Eagle3 head" in card
    assert "with 3 draft tokens" in card
    assert "assistant_model" not in card


def test_a_reduced_vocabulary_holds_the_frequent_tokens_and_every_end(
    tmp_path: Path, target: Path, feature_records: Path
) -> None:
    run(
        head_config(tmp_path / "out", target, records=str(feature_records), head={"vocab": 56}, export_dtype="bfloat16")
    )
    vocab = load_file(tmp_path / "out" / "model" / "model.safetensors")["vocab"]
    tokenizer = tiny_tokenizer()
    assert vocab.dtype == torch.int64
    assert len(vocab) == 56
    assert vocab.tolist() == sorted(set(vocab.tolist()))
    assert all(token in vocab for token in tokenizer.all_special_ids)
    model = AutoModelForCausalLM.from_pretrained(target)
    drafter = load_drafter(tmp_path / "out", target=model)
    assert isinstance(drafter, HeadDraft)
    logits = drafter.logits(torch.randn(1, 32))
    assert torch.equal(logits.isfinite().nonzero()[:, 1], vocab)
    ids, settings = torch.arange(10, 18)[None], {"max_new_tokens": 96, "eos_token_id": ()}
    drafted = generate(model, drafter, ids, **settings, seed=0)  # type: ignore[arg-type]
    assert torch.equal(drafted.sequences, generate(model, None, ids, **settings, seed=0).sequences)  # type: ignore[arg-type]
    new, accepted = drafted.sequences[0, ids.shape[1] :].tolist(), []
    for one in drafted.stats.rounds:
        accepted += new[: one.accepted]
        new = new[one.emitted :]
    assert len(accepted) > 3
    assert set(accepted) <= set(vocab.tolist())


def test_a_saved_head_is_continued(tmp_path: Path, target: Path, corpus: Path) -> None:
    text: dict[str, Any] = {"data": data_settings(corpus), "head": {"vocab": 100}}
    run(head_config(tmp_path / "first", target, **text))
    draft = {"init_from": str(tmp_path / "first")}
    run(head_config(tmp_path / "second", target, **text, draft=draft, lr=1e-9))
    first, second = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("first", "second"))
    for name, weight in first.items():
        assert torch.allclose(weight.float(), second[name].float(), atol=1e-6), name


def test_a_new_head_has_the_norms_and_a_saved_one_stays_of_its_kind(tmp_path: Path, target: Path, corpus: Path) -> None:
    """EAGLE-3.1 by default; a head of before goes on as it is, and is not taken for one of the other kind."""
    text: dict[str, Any] = {"data": data_settings(corpus)}
    first = tmp_path / "first"
    known = describe_model(ModelConfig(path=str(target)))
    new = head_blueprint(head_config(tmp_path, target, **text), known, None).config
    assert (new.fc_norm, new.norm_before_fc, new.norm_output) == (True, False, True)  # type: ignore[attr-defined]
    run(head_config(first, target, **text, head={"fc_norm": False, "norm_output": False}))
    draft = {"init_from": str(first)}
    again = head_blueprint(head_config(tmp_path, target, **text, draft=draft), known, None).config
    assert (again.fc_norm, again.norm_output) == (False, False)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="draft.head.fc_norm=True, and the head .* has False"):
        head_blueprint(head_config(tmp_path, target, **text, draft=draft, head={"fc_norm": True}), known, None)


@pytest.mark.parametrize("vocab", [None, 100])
def test_training_starts_from_the_targets_own_layer(
    tmp_path: Path, target: Path, corpus: Path, vocab: int | None
) -> None:
    """Under the names that Qwen's checkpoints use, beside the target's own weights."""
    own, folder = built_head(target, "mtp").head.state_dict(), shutil.copytree(target, tmp_path / "target")
    weights = load_file(folder / "model.safetensors") | {f"mtp.{name}": weight for name, weight in own.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    text: dict[str, Any] = {"data": data_settings(corpus), "steps": 2, "lr": 1e-9}
    run(head_config(tmp_path / "out", folder, "mtp", **text, head={"init_own": True, "vocab": vocab}))
    kept = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert kept.keys() - {"vocab"} == own.keys()
    assert all(torch.allclose(kept[name], weight, atol=1e-6) for name, weight in own.items())
    assert ("vocab" in kept) == (vocab is not None)


def test_muon_takes_the_layers_matrices_alone(tmp_path: Path, target: Path, corpus: Path) -> None:
    """Tables of tokens (DSpark's bias) map no hidden state to another."""
    run(head_config(tmp_path / "out", target, "dspark", data=data_settings(corpus), optimizer="muon", steps=2))
    head = TrainableHead(built_head(target, "dspark").head)
    module = DraftLoss(head.module, ObjectiveConfig(), None)
    cfg = head_config(tmp_path, target, "dspark", data=TEXT, optimizer="muon")
    muon, adamw = build_optimizers(module, head.token_tables(), cfg)
    names = {id(weight): name.removeprefix("draft.") for name, weight in module.named_parameters()}
    by_muon, by_adamw = (
        {names[id(weight)] for group in one.param_groups for weight in group["params"]} for one in (muon, adamw)
    )
    assert {"markov_in.weight", "markov_out.weight", "mask.weight"} <= by_adamw
    assert {"fc.weight", "layers.0.mlp.up_proj.weight"} <= by_muon
    assert len(by_muon) + len(by_adamw) == len(names)


def test_a_vocabulary_as_wide_as_the_target_hides_no_layer_from_muon(target: Path) -> None:
    """Medusa's layers are as wide as a vocabulary of d tokens, and all that it has."""
    known = built_head(target, "medusa").head
    width = known.config.hidden_size
    head = HEADS["medusa"][1](replace(known.config, draft_vocab_size=width), known.ends, torch.arange(width))
    cfg = head_config(Path("out"), target, "medusa", data=TEXT, optimizer="muon")
    muon, adamw = build_optimizers(head, TrainableHead(head).token_tables(), cfg)
    counts = [sum(len(group["params"]) for group in one.param_groups) for one in (muon, adamw)]
    assert counts == [known.config.depth] * 2  # a matrix and a bias for each head


def test_blocks_of_a_row_follow_the_run_not_the_saved_head(tmp_path: Path, target: Path, corpus: Path) -> None:
    """No weight is made of their number, and a longer row has more of them."""
    text: dict[str, Any] = {"data": data_settings(corpus), "steps": 2}
    run(head_config(tmp_path / "first", target, "dspark", **text, head={"anchors": None}))
    known, draft = describe_model(ModelConfig(path=str(target))), {"init_from": str(tmp_path / "first")}

    def anchors(**changes: Any) -> int:
        cfg = head_config(tmp_path, target, "dspark", **text, draft=draft, **changes)
        return head_blueprint(cfg, known, None).config.anchors  # type: ignore[attr-defined]

    assert anchors(head={"anchors": None}) == 4
    assert anchors(head={"anchors": None}, sequence_length=64) == 8
    assert anchors(head={"anchors": 5}) == 5


@pytest.mark.parametrize("vocab", [None, 40])
def test_muon_leaves_tables_of_a_reduced_vocabulary_alone(target: Path, vocab: int | None) -> None:
    known = built_head(target, "dspark").head
    ids = None if vocab is None else torch.arange(vocab)
    head = HEADS["dspark"][1](replace(known.config, draft_vocab_size=vocab), known.ends, ids)
    cfg = head_config(Path("out"), target, "dspark", data=TEXT, optimizer="muon")
    muon, _ = build_optimizers(head, TrainableHead(head).token_tables(), cfg)
    moved = {id(weight) for group in muon.param_groups for weight in group["params"]}
    tables = {name for name, weight in head.named_parameters() if weight.ndim == 2 and id(weight) not in moved}
    assert {name.split(".")[0] for name in tables} == {"markov_in", "markov_out", "mask"}


@pytest.fixture
def refuse(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a head that must be refused with this message, before any weight is loaded."""

    def no_weights(*_: object) -> None:
        raise AssertionError("weights were about to be loaded")

    monkeypatch.setattr(stage, "build_compute", no_weights)

    def check(target: Path, message: str, family: str = "eagle3", **changes: Any) -> None:
        source = {} if "records" in changes else {"data": data_settings(corpus)}
        with pytest.raises(UserError, match=message):
            run(head_config(tmp_path / "out", target, family, **source, **changes))
        assert not (tmp_path / "out").exists()

    return check


def test_records_without_hidden_states(refuse, target: Path, records: Path) -> None:
    refuse(target, r"records.features.layers=\[0,1,-1\].*target_source=live", records=str(records))


def test_a_target_that_heads_do_not_know(refuse, tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(vocab_size=300, eos_token_id=None, n_embd=32, n_layer=2, n_head=2)).save_pretrained(
        folder
    )
    tiny_tokenizer().save_pretrained(folder)
    refuse(folder, "gpt2 model, whose hidden states heads cannot be built on: its first layer does not get")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "eagle3",
            {"objective": {"name": "cross_entropy"}, "target_source": "records"},
            "text holds none. Set target_source=live",
        ),
        ("eagle3", {"head": {"taps": None}}, r"3 different hidden states, .* 2 layers.*draft.head.taps=\[0,1,-1\]"),
        ("eagle3", {"head": {"taps": [0, 1, 5]}}, "which has 2 layers: name different ones"),
        ("eagle3", {"head": {"vocab": 1}}, "no room for the 2 special"),
        ("eagle3", {"head": {"vocab": 301}}, "more than the 300 tokens"),
        ("dspark", {"head": {"mask_token": 300, "layout": "anchor"}}, "mask_token=300, .*rows 0 to 299. Name a token"),
        ("dspark", {"head": {"mask_token": 300, "layout": "fill_in"}}, "mask_token=300, .*rows 0 to 299. Name a token"),
        ("eagle3", {"head": {"depth": 31}}, "has no room for a token"),
        ("mtp", {"head": {"taps": [0, 1]}}, "starts from the final hidden state"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_target(refuse, target: Path, family: str, changes: Any, message: str) -> None:
    refuse(target, message, family=family, **changes)


def test_a_shallow_target_is_read_at_shares_of_its_depth() -> None:
    """2, L/2 and L - 3 are the same layer twice at 6 layers, and side by side at 7."""
    found = {layers: default_taps("eagle3", layers, "there") for layers in (4, 5, 6, 7, 8, 36)}
    assert found == {4: (1, 2, 3), 5: (1, 2, 4), 6: (2, 3, 4), 7: (2, 4, 5), 8: (2, 4, 5), 36: (2, 18, 33)}
    with pytest.raises(UserError, match="reads 3 different hidden states, and .* has 3 layers"):
        default_taps("eagle3", 3, "there")


def test_a_saved_head_that_is_another_one(refuse, tmp_path: Path, target: Path, corpus: Path) -> None:
    folder = tmp_path / "saved"
    shutil.copytree(target, folder)
    refuse(target, "of family lm, and draft.family=eagle3", draft={"init_from": str(folder)})
    refuse(target, "holds no saved head", draft={"init_from": str(tmp_path / "nothing")})


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"width": 32}, "as wide as that"),
        ({"lora": {"rank": 4}}, "would stay random"),
        ({"head": {"prefix_attention": True}}, "is for draft=hydra"),
        ({"head": {"init_own": True}}, "is for draft=mtp"),
        ({"head": {"markov_rank": 4}}, "is for draft=dspark"),
        ({"head": {"mlp_layers": 2}}, "is for draft=medusa and hydra"),
        ({"layers": 2}, "of one layer"),
        ({"head": {"markov_rank": 0}}, "is for draft=dspark"),
        ({"head": {"confidence": False}}, "is for draft=dspark"),
        ({"head": {"layout": "anchor"}}, "head.layout=anchor is for draft=dspark"),
        ({"head": {"candidates": 4}}, "head.candidates=4 is for draft=dflash2 and lilicorr"),
        ({"head": {"causal": True}}, "head.causal=True is for draft=dspark and dflash2 and lilicorr"),
        ({"family": "dflash2", "head": {"layout": "fill_in"}}, "head.layout=fill_in is for draft=dspark"),
        ({"head": {"mask_token": 0}}, "head.mask_token=0 is for draft=dspark"),
        ({"family": "dspark", "head": {"layout": "sideways"}}, "head.layout"),
        ({"family": "dspark", "head": {"mask_token": -1}}, "head.mask_token=-1 must be at least 0"),
        ({"family": "mtp", "head": {"init_own": True}, "init_from": "there"}, "set one of them"),
        ({"head": {"taps": []}}, "must name different hidden states"),
        ({"head": {"depth": 0}}, "head.depth=0"),
        ({"head": {"taps": [1, 1]}}, "different hidden states"),
    ],
)
def test_settings_of_other_families(draft: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_config(Path("out"), Path("t"), records="r", draft={"width": None, "family": "eagle3"} | draft)


def test_a_head_needs_a_target() -> None:
    with pytest.raises(UserError, match="draft=eagle3 drafts from hidden states"):
        tiny_config(Path("out"), None, data={"name": "python_stdlib"}, draft={"family": "eagle3", "width": None})


def test_a_head_follows_a_target_that_moved(tmp_path: Path, target: Path, corpus: Path, caplog: Any) -> None:
    """It goes on from its own weights, is the new target's then, and no longer the old one's."""
    text: dict[str, Any] = {"data": data_settings(corpus), "head": {"vocab": 100}}
    run(head_config(tmp_path / "first", target, **text, objective={"name": "lk_hybrid"}))
    other = save_target(tmp_path / "other", seed=1)
    run(head_config(tmp_path / "second", other, **text, draft={"init_from": str(tmp_path / "first")}, lr=1e-9))
    assert "trained by objective=lk_hybrid, and this run trains by forward_kl" in caplog.text
    first, second = (load_file(tmp_path / name / "model/model.safetensors") for name in ("first", "second"))
    assert all(torch.allclose(weight.float(), second[name].float(), atol=1e-6) for name, weight in first.items())
    assert f"was trained on {target}; it goes on with {other}" in caplog.text
    load_drafter(tmp_path / "second", target=LlamaForCausalLM.from_pretrained(other))
    with pytest.raises(UserError, match="trained on the hidden states of"):
        load_drafter(tmp_path / "second", target=LlamaForCausalLM.from_pretrained(target))
    wide = save_tiny_target(tmp_path / "wide", hidden_size=64)
    with pytest.raises(UserError, match="hidden_size"):
        run(head_config(tmp_path / "third", wide, **text, draft={"init_from": str(tmp_path / "first")}))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    one, two = sorted(words, key=words.get)[-2:]
    words[one], words[two] = words[two], words[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="drafts tokens of another tokenizer"):
        run(head_config(tmp_path / "third", other, **text, draft={"init_from": str(tmp_path / "first")}))
    assert not (tmp_path / "third").exists()


@pytest.fixture(scope="module")
def sharp_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Far from uniform: what is drafted by guessing is rejected."""
    return save_tiny_target(tmp_path_factory.mktemp("sharp") / "model", hidden_size=64)


@pytest.mark.parametrize("family", by_default(1, HEADS))
def test_a_text_known_by_heart_is_drafted_whole(sharp_target: Path, family: str) -> None:
    known = overfit(sharp_target, family)
    written = known.text[0, PROMPT.shape[1] :].tolist()
    assert len(set(written)) > NEW_TOKENS * 0.8, "in a text that repeats itself a shifted label would be right too"
    assert known.loss < 0.1
    depth = known.head.config.depth
    out = generate(
        known.target,
        known.head,
        PROMPT,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=(),
        temperature=0.0,
        num_draft_tokens=depth,
        seed=0,
    )
    assert torch.equal(out.sequences, known.text)
    accepted = [one.accepted for one in out.stats.rounds]
    assert sum(accepted) >= depth * len(accepted) - 2, accepted  # the last round may be cut
