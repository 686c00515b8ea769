"""Heads in folders and in memory: those that are not whole, of this version or of this target are refused before a
weight is loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoConfig, GPTNeoForCausalLM, PreTrainedModel

from decode import generate, load_drafter
from decode.common.errors import InputError, UserError
from decode.drafters.provenance import TrainedTarget
from decode.drafters.saved_draft import describe_draft
from decode.drafters.saved_head import is_of
from decode.models.describe import ModelDescription, describe_loaded
from tests.decode.checks import VOCAB, ragged_prompts
from tests.decode.heads import random_head
from tests.tiny import save_tiny_target, tiny_llama

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(num_layers=6, eos_token_id=3).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path, target: PreTrainedModel) -> Path:
    return saved("eagle3", target, tmp_path)


def saved(name: str, target: PreTrainedModel, folder: Path) -> Path:
    """A random head, as training would export it."""
    head, known = random_head(name, target), describe_loaded(target)
    (folder / "config.json").write_text(json.dumps(asdict(head.config)))
    save_file(head.state_dict(), folder / "model.safetensors")
    trained_on = {"path": known.path, "fingerprint": known.fingerprint, "weights": known.weights_fingerprint}
    provenance = {"schema": 1, "family": head.config.family, "target": trained_on}
    (folder / "draftsmith.json").write_text(json.dumps(provenance))
    return folder


def test_a_whole_folder_is_loaded(folder: Path, target: PreTrainedModel) -> None:
    draft = describe_draft(str(folder), describe_loaded(target))
    head = load_drafter(folder, target=target)
    assert draft.family == "eagle3"
    assert draft.num_parameters == sum(weight.numel() for weight in head.parameters())  # type: ignore[attr-defined]


def edited(name: str, **fields: object) -> Damage:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | fields))

    return edit


def truncated(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def emptied(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def without_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["fc.weight"]
    save_file(weights, folder / "model.safetensors")


def without(*names: str) -> Damage:
    def edit(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        for name in names:
            del content[name]
        (folder / "config.json").write_text(json.dumps(content))

    return edit


def test_a_head_with_norms_is_never_loaded_without_them(folder: Path, target: PreTrainedModel) -> None:
    """The flag that has no weights is told by the checksum."""
    head = random_head("eagle3.1", target)
    text = json.dumps(asdict(head.config))
    (folder / "config.json").write_text(text)
    save_file(head.state_dict(), folder / "model.safetensors")
    edited("draftsmith.json", sha256={"config.json": hashlib.sha256(text.encode()).hexdigest()})(folder)
    load_drafter(folder, target=target)
    edited("config.json", norm_output=False)(folder)
    with pytest.raises(UserError, match=r"config.json has SHA-256"):
        load_drafter(folder, target=target)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edited("config.json", layout="sideways"), "layout"),
        (edited("config.json", mask_token=64), "mask_token=64, and the target's embedding.*0 to 63"),
        (edited("config.json", mask_token=-1), "mask_token"),
        (edited("config.json", mask_token=None), "mask.weight missing"),
        (without("layout"), "do not share the fields layout"),
        (without("mask_token"), "do not share the fields mask_token"),
    ],
)
def test_a_damaged_layout_is_refused(tmp_path: Path, target: PreTrainedModel, damage: Damage, message: str) -> None:
    damage(saved("dspark-fill-in", target, tmp_path))
    with pytest.raises(UserError, match=message):
        describe_draft(str(tmp_path), describe_loaded(target))


def test_layers_between_the_edges_of_files_tell_targets_apart() -> None:
    """A fingerprint of files reads a megabyte at their ends: MLPs alone that were trained further lay in between."""
    trained = TrainedTarget(path="there", fingerprint="f", weights="bfloat16:1")
    here = {"fingerprint": "f", "stored_fingerprint": "bfloat16:2"}
    assert not is_of(trained, cast(ModelDescription, SimpleNamespace(**here)))
    for same in ({"stored_fingerprint": "bfloat16:1", "fingerprint": "g"}, {"stored_fingerprint": None}):
        assert is_of(trained, cast(ModelDescription, SimpleNamespace(**here | same)))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "lacks model.safetensors"),
    "half of the weights": (truncated, "damaged"),
    "a tensor less": (without_a_tensor, "fc.weight missing"),
    "an empty configuration": (emptied, "family=None"),
    "another family": (edited("config.json", family="zzz"), "family='zzz'"),
    "a field too many": (edited("config.json", more=1), "do not share the fields more"),
    "another width": (edited("config.json", mlp_width=48), "mlp.up_proj.weight"),
    "some of the norms' fields": (without("norm_output"), "do not share the fields norm_output"),
    "two norms for one place": (
        edited("config.json", fc_norm=True, norm_before_fc=True),
        "both normalise what fc reads",
    ),
    "no draft tokens": (edited("config.json", depth=0), "depth is 0"),
    "hidden states that are not there": (edited("config.json", taps=[0, 1, 40]), "which has 6 layers"),
    "no target": (edited("draftsmith.json", target={}), "another|trained on the hidden states of None"),
    "another target": (edited("draftsmith.json", target={"path": "x", "fingerprint": "y"}), "fingerprint y"),
    "a narrower target": (edited("config.json", hidden_size=16), "hidden_size=16, and .* has 32"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused(folder: Path, target: PreTrainedModel, damage: str) -> None:
    change, message = DAMAGES[damage]
    change(folder)
    with pytest.raises(UserError, match=message):
        describe_draft(str(folder), describe_loaded(target))
    with pytest.raises(UserError, match=message):
        load_drafter(folder, target=target)


def test_a_vocabulary_without_an_end_is_refused(folder: Path, target: PreTrainedModel) -> None:
    head = random_head("eagle3", target, vocab=torch.arange(0, 64, 2))
    (folder / "config.json").write_text(json.dumps(asdict(head.config)))
    save_file(head.state_dict(), folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks the end of text \[3\]"):
        load_drafter(folder, target=target)


def loaded(target: PreTrainedModel, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(target.config.name_or_path, dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_precision_of_the_target_is_not_another_target(
    folder: Path, target: PreTrainedModel, dtype: torch.dtype
) -> None:
    load_drafter(folder, target=loaded(target, dtype))


def test_a_target_whose_weights_were_changed_in_memory_is_refused(folder: Path, target: PreTrainedModel) -> None:
    """As a merged adapter changes them: the files are those that the head knows."""
    changed = loaded(target)
    with torch.no_grad():
        changed.get_parameter("model.layers.3.self_attn.q_proj.weight").add_(0.01)
    both = f"weights {describe_loaded(target).weights_fingerprint}.*has {describe_loaded(changed).weights_fingerprint}"
    with pytest.raises(UserError, match=both):
        load_drafter(folder, target=changed)
    load_drafter(folder, target=changed, check=False)


def test_a_wrapped_target_is_the_one_that_its_adapter_makes_of_it(folder: Path, target: PreTrainedModel) -> None:
    """A head of the plain model serves it while adapters are off; with one on it is another target."""
    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(loaded(target), settings).eval()  # type: ignore[arg-type]
    with model.disable_adapter():
        load_drafter(folder, target=model)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="changed after they were loaded"):
        load_drafter(folder, target=model)  # type: ignore[arg-type]
    drafter, ids = load_drafter(folder, target=model, check=False), torch.tensor([[5, 6, 7]])  # type: ignore[arg-type]
    texts = [generate(model, one, ids, max_new_tokens=8, eos_token_id=(), seed=0) for one in (None, drafter)]  # type: ignore[arg-type]
    assert torch.equal(texts[0].sequences, texts[1].sequences)


def test_a_head_that_does_not_know_the_weights_goes_by_the_files(folder: Path, target: PreTrainedModel) -> None:
    """Heads of earlier versions."""
    known = describe_loaded(target)
    edited("draftsmith.json", target={"path": known.path, "fingerprint": known.fingerprint})(folder)
    load_drafter(folder, target=target)


def test_a_target_that_came_from_nowhere_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    draft = tmp_path_factory.mktemp("draft")
    tiny_llama(num_layers=1, seed=3).save_pretrained(draft)
    target = tiny_llama(num_layers=6, eos_token_id=3)
    for path in (folder, draft):
        with pytest.raises(UserError, match="built in memory.*check=False"):
            load_drafter(path, target=target)
    with pytest.raises(UserError, match="holds no MTP layer"):
        load_drafter("mtp", target=target, check=False)


def test_who_insists_drafts_for_a_target_that_came_from_nowhere(folder: Path, tmp_path: Path) -> None:
    tiny_llama(num_layers=1, seed=3).save_pretrained(tmp_path / "lm")
    target = tiny_llama(num_layers=6, eos_token_id=3)
    ids = torch.tensor([[5, 6, 7]])
    plain = generate(target, None, ids, max_new_tokens=4, eos_token_id=(), seed=0)
    for path in (folder, tmp_path / "lm"):
        drafter = load_drafter(path, target=target, check=False)
        drafted = generate(target, drafter, ids, max_new_tokens=4, eos_token_id=(), num_draft_tokens=2, seed=0)
        assert torch.equal(plain.sequences, drafted.sequences)


@pytest.mark.parametrize(("size", "value"), [("hidden_size", 64), ("vocab_size", 80)])
def test_insisting_does_not_make_sizes_fit(folder: Path, tmp_path: Path, size: str, value: int) -> None:
    other = tiny_llama(**{"num_layers": 6, "eos_token_id": 3, size: value})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"{size}=.*has {value}"):
        load_drafter(folder, target=other, check=False)
    tiny_llama(num_layers=1).save_pretrained(tmp_path / "lm")
    if size == "vocab_size":
        with pytest.raises(UserError, match="64 vocabulary entries.*80"):
            load_drafter(tmp_path / "lm", target=other, check=False)


def test_a_model_in_memory_drafts_and_stays_what_it_is() -> None:
    target = tiny_llama(VOCAB, dtype=torch.float64)
    draft = tiny_llama(VOCAB, num_layers=1, seed=3, dtype=torch.float64).train()
    before = {name: weight.clone() for name, weight in draft.named_parameters()}
    drafter = load_drafter(draft, target=target)
    ids, mask = ragged_prompts(2)
    call: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": (), "seed": 0}
    drafted = generate(target, drafter, ids, mask, **call)
    assert torch.equal(drafted.sequences, generate(target, None, ids, mask, **call).sequences)
    assert draft.training
    assert all(weight.requires_grad and torch.equal(weight, before[name]) for name, weight in draft.named_parameters())
    itself = generate(target, load_drafter(target, target=target), ids, mask, num_draft_tokens=3, **call)
    assert itself.stats.tau == 4.0


def test_another_precision_or_vocabulary_is_refused() -> None:
    target = tiny_llama(VOCAB)
    draft = tiny_llama(VOCAB, num_layers=1, dtype=torch.float64)
    load_drafter(draft, target=target)
    for dtype, model in (("float32", draft), ("auto", tiny_llama(70, num_layers=1))):
        with pytest.raises(
            InputError, match="torch.float64.*torch.float32.*to\\(" if model is draft else "70 voc.*has 64"
        ):
            load_drafter(model, target=target, dtype=dtype)  # type: ignore[arg-type]


def test_a_model_in_memory_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(save_tiny_target(tmp_path / "target"))
    file = save_tiny_target(tmp_path / "draft", num_layers=1) / "tokenizer.json"
    draft = AutoModelForCausalLM.from_pretrained(file.parent)
    load_drafter(draft, target=target)
    text = file.read_text()
    file.write_text(text.replace('"!": 2', '"!": 999').replace('"#": 4', '"#": 2').replace('"!": 999', '"!": 4'))
    assert file.read_text() != text
    with pytest.raises(InputError, match="tokenizers differ"):
        load_drafter(draft, target=target)
    load_drafter(draft, target=target, check=False)


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (torch.nn.Linear(2, 2), "of type Linear"),
        (3, "of type int"),
        (
            GPTNeoForCausalLM(
                GPTNeoConfig(
                    vocab_size=64, hidden_size=32, num_layers=1, num_heads=4, attention_types=[[["global"], 1]]
                )
            ),
            "draft.path=.*gpt_neo",
        ),
    ],
    ids=["module", "number", "kind"],
)
def test_what_cannot_draft_is_refused(draft: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_drafter(draft, target=tiny_llama(VOCAB))
