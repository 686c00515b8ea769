"""Heads as others publish them: found by what the folder holds, drafted with, and computed as their authors do; folders
that are mixed, cut short, of no known layout or of another target are refused, and faults are noticed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from decode import generate, load_drafter
from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.drafters.base import Batch
from decode.drafters.dspark import DSparkConfig
from decode.drafters.head_draft import HeadDraft
from decode.drafters.saved_draft import describe_draft
from decode.formats.form import published_form
from decode.models.describe import describe_loaded, describe_model
from tests.commands import main_of
from tests.decode.heads import batch_of
from tests.decode.published_folders import DRAFTED, PUBLISHED, VOCAB, random, save_target
from tests.faults import Fault, check_caught, noticed_by
from tests.tiers import by_default
from tests.tiny import save_tiny_target
from train.check.replicas import REPLICAS
from train.check.replicas.base import Served

pytestmark = pytest.mark.usefixtures("uncaptured")

EAGLE = (2, 4, 5)
TAPS = {"yuhuili": EAGLE, "RedHatAI": EAGLE, "SpecForge": EAGLE} | dict.fromkeys(("FasterDecoding", "TGI"), (-1,))
TAPS |= dict.fromkeys(
    ("AngelSlim", "speculators-qwen3", "speculators-peagle", "z-lab", "z-lab's second", "NVIDIA", "deepseek-ai"),
    (2, 4, 6),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(save_target(tmp_path_factory.mktemp("target")))


def publish(who: str, folder: Path, target: LlamaForCausalLM) -> Path:
    return PUBLISHED[who][0](folder / "a-name-that-tells-nothing", target.model.embed_tokens.weight.detach())


@pytest.mark.parametrize("who", by_default(5, PUBLISHED))
def test_a_published_head_drafts_what_its_target_writes(who: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    _, form, family = PUBLISHED[who]
    folder = publish(who, tmp_path, target)
    head = load_drafter(folder, target=target)
    described = describe_draft(str(folder), describe_loaded(target))
    assert published_form(folder) == form
    assert described.family == family
    assert isinstance(head, HeadDraft)
    assert described.num_parameters == sum(one.numel() for one in head.parameters()) + (
        0 if head.vocab is None else len(head.vocab)
    )
    assert head.taps == TAPS[who]
    prompts = torch.randint(4, VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 20, "temperature": 0.0, "eos_token_id": ()}
    drafted = generate(target, head, prompts, **settings)
    assert torch.equal(drafted.sequences, generate(target, None, prompts, **settings).sequences)
    assert any(one.drafted for one in drafted.stats.rounds)


@pytest.mark.parametrize("who", PUBLISHED)
def test_its_logits_are_those_of_its_authors_method(who: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Computed by plain functions from the file's own tensors, which share nothing with our modules."""
    folder = publish(who, tmp_path, target)
    head = load_drafter(folder, target=target)
    assert isinstance(head, HeadDraft)
    texts = torch.randint(4, VOCAB, (1, 16), generator=torch.Generator().manual_seed(0)).tolist()
    batch = batch_of(target, head, texts)
    steps = min(4, head.config.depth)
    ours, places = of_head(head, batch, steps)
    served = as_published(folder, target, head)
    assert batch.features is not None
    theirs = REPLICAS[PUBLISHED[who][1]](served, batch.ids[0], batch.features[0], places, steps)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        inside = one.isfinite()
        assert torch.allclose(one[inside], other[inside], atol=1e-4)


def test_a_lattice_is_read_by_the_names_of_its_trainer_too(tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Model Optimizer numbers what vLLM names (modeling_lilicorr.py)."""
    folder = publish("NVIDIA", tmp_path, target)
    named = load_drafter(folder, target=target)
    file, numbered = folder / "model.safetensors", {}
    parts = {
        "feature_norm.": "feature_mlp.0.",
        "feature_mlp.up_proj": "feature_mlp.1",
        "feature_mlp.down_proj": "feature_mlp.3",
    }
    for name, one in load_file(file).items():
        for theirs, ours in {**parts, ".mlp.up_proj": ".mlp.0", ".mlp.down_proj": ".mlp.2"}.items():
            name = name.replace(theirs, ours) if name.startswith("lilicorr.") else name
        numbered[name] = one
    save_file(numbered, file)
    again = load_drafter(folder, target=target)
    assert isinstance(named, HeadDraft)
    assert isinstance(again, HeadDraft)
    assert len(set(numbered) - set(named.state_dict())) == 2 + 2 * 2 + 2 * 2 * 2
    for name, one in again.state_dict().items():
        assert torch.equal(one, named.state_dict()[name]), name


def of_head(head: HeadDraft, batch: Batch, steps: int) -> tuple[list[Tensor], Tensor]:
    """Logits (N, V) of each step at places (N,) of the last committed token."""
    if isinstance(head.config, DSparkConfig):
        head.config = replace(head.config, anchors=64)  # a block behind every token
    found = list(head.unroll(batch))[:steps]
    at = [torch.where(one.valid[0], one.target_rows[0] - step, -1).tolist() for step, one in enumerate(found)]
    places = sorted(set.intersection(*map(set, at)) - {-1, 0})
    logits = [
        head.widened(one.drafted(one.hidden[0, [own.index(place) for place in places]])).float()
        for one, own in zip(found, at, strict=True)
    ]
    return logits, torch.tensor(places)


def as_published(folder: Path, target: LlamaForCausalLM, head: HeadDraft) -> Served:
    """The file's tensors by the names that replicas know, with fields that transformers would put in."""
    written = json.loads((folder / "config.json").read_text())
    fields = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, **written, **(written.get("transformer_layer_config") or {})}
    fields["norm_before_residual"] = written.get("norm_before_residual", False)
    fields.setdefault("head_dim", 8)
    file = next(one for one in folder.iterdir() if one.name != "config.json")
    tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    renamed = {}
    for name, one in tensors.items():
        name = name.replace("midlayer.", "layers.0.")
        parts = name.split(".")
        if parts[0].isdigit():
            name = (
                f"blocks.{parts[0]}.layers.{parts[1]}.{parts[3]}" if len(parts) == 4 else f"lm_heads.{parts[0]}.weight"
            )
        renamed[name] = one.float()
    embedding, rows = target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach()
    drafted = DRAFTED if head.vocab is not None else None
    return Served(fields, renamed, embedding, rows, drafted, embedding[7:8])


def test_a_language_model_is_no_head(tmp_path: Path) -> None:
    assert published_form(save_tiny_target(tmp_path / "lm")) is None


def test_a_quantised_language_model_is_none_either(tmp_path: Path) -> None:
    """Types of tensors are looked at in heads alone."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({name: torch.zeros(2, 2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    assert published_form(tmp_path) is None


@pytest.mark.parametrize("content", ["{", "[]", '{"architectures": 3}', "{}"])
def test_what_its_own_reader_refuses_is_left_to_it(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    assert published_form(tmp_path) is None


Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def folder_of(who: str, folder: Path, target_folder: Path) -> Path:
    embedding = LlamaForCausalLM.from_pretrained(target_folder).model.embed_tokens.weight.detach()
    return PUBLISHED[who][0](folder / who, embedding)


def setting(**fields: object) -> Damage:
    def edit(folder: Path) -> None:
        written = json.loads((folder / "config.json").read_text()) | fields
        kept = {name: value for name, value in written.items() if value != "absent"}
        (folder / "config.json").write_text(json.dumps(kept))

    return edit


def tensors(edit: Callable[[dict[str, Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        (file,) = (one for one in folder.iterdir() if one.name != "config.json")
        is_safe = file.suffix == ".safetensors"
        held = load_file(file) if is_safe else torch.load(file, weights_only=True)
        edit(held)
        save_file(held, file) if is_safe else torch.save(held, file)

    return damage


def cut_short(folder: Path) -> None:
    (file,) = (one for one in folder.iterdir() if one.name != "config.json")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


class Program:
    """What unpickling would run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path("/nowhere/that/a/test/writes").touch, ("x",))


def with_a_program(folder: Path) -> None:
    torch.save({"fc.weight": Program()}, folder / "pytorch_model.bin")


def another_pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").rename(folder / "model.pkl")


def with_medusa(folder: Path) -> None:
    save_file({"0.0.linear.weight": random(32, 32), "0.0.linear.bias": random(32)}, folder / "more.safetensors")


def drop(name: str) -> Damage:
    return tensors(lambda held: held.pop(name))


def grow(name: str) -> Damage:
    return tensors(lambda held: held.update({name: torch.cat([held[name], held[name]])}))


def shift(name: str) -> Damage:
    return tensors(lambda held: held.update({name: held[name] + 1}))


BLOCK = {"mask_token_id": 7, "target_layer_ids": [1, 3, 5], "causal": True}
DAMAGES: dict[str, tuple[str, Damage, str]] = {
    "two forms": ("RedHatAI", with_medusa, "several forms of head, eagle3 and medusa"),
    "another form's configuration": ("z-lab", setting(architectures=["LlamaForCausalLMEagle3"]), "names eagle3, and"),
    "no known layout": ("yuhuili", tensors(lambda held: [held.pop(one) for one in [*held] if "midlayer" in one]),
                        "no head that is known here"),
    "a safetensors file cut short": ("RedHatAI", cut_short, "damaged"),
    "a pickled file cut short": ("yuhuili", cut_short, "damaged|cannot be read"),
    "a program": ("yuhuili", with_a_program, "nothing of it was run"),
    "a pickle of another name": ("yuhuili", another_pickle, "none of pytorch_model.bin.*model.pkl"),
    "not tensors by name": ("FasterDecoding", lambda folder: torch.save([1], folder / "medusa_lm_head.pt"),
                            "holds no tensors by name"),
    "a tensor less": ("yuhuili", drop("fc.weight"), "fc.weight missing"),
    "a tensor more": ("AngelSlim", tensors(lambda held: held.update(more_hidden=random(32))), "more_hidden"),
    "a wrong shape": ("z-lab", grow("layers.1.mlp.up_proj.weight"), r"layers.1.mlp.up_proj.weight \(96, 32\)"),
    "a head cut off": ("FasterDecoding", setting(medusa_num_heads=5), "holds 4 heads: the others are lost"),
    "no bias matrix": ("deepseek-ai", drop("markov_head.markov_w2.weight"), "markov_w2"),
    "lists that differ": ("deepseek-ai", setting(dflash_config={"target_layer_ids": [0, 1, 2]}), "different hidden"),
    "states that are not there": ("z-lab", setting(dflash_config={"mask_token_id": 7, "target_layer_ids": [1, 3, 50]}),
                                  "which has 8 layers"),
    "no list of states": ("z-lab", setting(dflash_config={"mask_token_id": 7}), "lists no target_layer_ids"),
    "no mask": ("z-lab", setting(dflash_config={"target_layer_ids": [1, 3, 5]}), "no mask_token_id"),
    "blocks of two orders": ("z-lab's second", setting(is_causal=False), "is_causal beside another causal"),
    "layers with windows": ("z-lab", setting(layer_types=["sliding_attention", "full_attention"]), "layers a window"),
    "a lattice that takes no part": ("NVIDIA", setting(lilicorr_enabled=False), "lilicorr_enabled=false"),
    "a lattice without sizes": ("NVIDIA", setting(dflash_config=BLOCK), "does not say lilicorr_candidate_topk"),
    "a selector without sizes": ("z-lab's second", setting(dflash_config=BLOCK), "does not say conv_kernel_size"),
    "scaled logits": (
        "z-lab's second", setting(final_logit_softcapping=30.0), "sets final_logit_softcapping=30.0, and embedding"
    ),
    "a second layer": ("yuhuili", setting(num_hidden_layers=2), "num_hidden_layers=2"),
    "draft ids outside": ("SpecForge", tensors(lambda held: held.update(d2t=held["d2t"] + 40)), "different tokens"),
    "no width": ("z-lab", setting(hidden_size="absent"), "hidden_size"),
    "a single number": ("RedHatAI", tensors(lambda held: held.update({"embed_tokens.weight": torch.tensor(1.0)})),
                        "embed_tokens.weight of .* is a single number"),
    "an embedding of whole numbers": (
        "RedHatAI", tensors(lambda held: held.update({"embed_tokens.weight": held["embed_tokens.weight"].long()})),
        "64 of 64 compared rows of embed_tokens.weight",
    ),
    "a billion heads": (
        "FasterDecoding", tensors(lambda held: held.update({"999999999.0.linear.weight": random(1, 1)})),
        "5 residual layers of Medusa heads, and 1000000000 heads",
    ),
    "a mask below zero": ("z-lab", setting(dflash_config={"mask_token_id": -1, "target_layer_ids": [1, 3, 5]}),
                          "mask_token_id=-1, and the target has tokens 0 to 299"),
    "a mask behind the last row": ("deepseek-ai", setting(mask_token_id=VOCAB), "mask_token_id=300, and the target"),
    "lengths of words": ("RedHatAI", setting(speculators_config="greedy"), "speculators_config"),
    "lengths without end": (
        "RedHatAI", setting(speculators_config={"proposal_methods": [{"speculative_tokens": 1 << 40}]}),
        "speculative_tokens",
    ),
    "a width of words": ("z-lab", setting(hidden_size="wide"), "hidden_size"),
    "whole numbers": ("TGI", tensors(lambda held: held.update({n: one.long() for n, one in held.items()})), "int64"),
    "another width": ("z-lab", setting(hidden_size=64), "hidden_size=64, and .* has 32"),
    "another vocabulary": ("yuhuili", setting(vocab_size=VOCAB + 8), "vocab_size=308, and .* has 300"),
    "another vocabulary, by its heads": ("FasterDecoding", grow("0.1.weight"), "vocab_size=600, and .* has 300"),
    "another target's embedding": ("RedHatAI", shift("embed_tokens.weight"), "64 of 64 compared rows of embed_tokens"),
    "another target's output head": (
        "deepseek-ai", tensors(lambda held: held.update({"lm_head.weight": random(VOCAB, 32)})),
        "rows of lm_head.weight .* output head",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_bad_folder_is_refused_by_its_description(name: str, tmp_path: Path, target_folder: Path) -> None:
    who, damage, words = DAMAGES[name]
    folder = folder_of(who, tmp_path, target_folder)
    known = describe_model(ModelConfig(path=str(target_folder)))
    describe_draft(str(folder), known)
    damage(folder)
    with pytest.raises(InputError, match=words):
        describe_draft(str(folder), known)
    with pytest.raises(InputError, match=words):
        load_drafter(folder, target=LlamaForCausalLM.from_pretrained(target_folder))


def test_one_row_of_another_target_is_found_when_the_target_is_loaded(tmp_path: Path, target_folder: Path) -> None:
    """Before that, 64 rows are sampled."""
    folder = folder_of("RedHatAI", tmp_path, target_folder)
    model = LlamaForCausalLM.from_pretrained(target_folder)
    model.model.embed_tokens.weight.data[10] += 1
    copy = tmp_path / "copy"
    model.save_pretrained(copy)
    with pytest.raises(InputError, match=r"1 of 300 compared rows of embed_tokens.weight"):
        load_drafter(folder, target=LlamaForCausalLM.from_pretrained(copy))
    load_drafter(folder, target=LlamaForCausalLM.from_pretrained(copy), check=False)


def test_weights_that_are_no_numbers(tmp_path: Path, target_folder: Path) -> None:
    folder = folder_of("FasterDecoding", tmp_path, target_folder)
    tensors(lambda held: held["1.0.linear.weight"].fill_(torch.nan))(folder)
    with pytest.raises(InputError, match=r"heads.1.0.linear.weight of .* holds NaN"):
        load_drafter(folder, target=LlamaForCausalLM.from_pretrained(target_folder))


def test_rounding_is_no_other_target(tmp_path: Path, target_folder: Path) -> None:
    folder = folder_of("RedHatAI", tmp_path, target_folder)
    tensors(lambda held: held.update({n: one.half() for n, one in held.items() if one.is_floating_point()}))(folder)
    for dtype in (torch.float32, torch.bfloat16):
        load_drafter(folder, target=LlamaForCausalLM.from_pretrained(target_folder, dtype=dtype))


def test_the_command_ends_with_exit_code_2(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("RedHatAI", tmp_path, target_folder)
    shutil.copytree(folder, tmp_path / "bad")
    cut_short(tmp_path / "bad")
    monkeypatch.setattr(
        sys, "argv", ["decode", f"target.path={target_folder}", f"draft.path={tmp_path / 'bad'}", "prompt=x"]
    )
    with pytest.raises(SystemExit) as ended:
        main_of("decode")()
    assert ended.value.code == 2


FAULTS = [
    *noticed_by(
        partial(test_its_logits_are_those_of_its_authors_method, who="RedHatAI"),
        ("decode.formats.vocabulary:drafted_ids", "offsets + torch.arange(len(offsets))", "offsets"),
    ),
    *noticed_by(
        partial(test_a_published_head_drafts_what_its_target_writes, who="yuhuili"),
        ("decode.drafters.eagle3:usual_taps", "num_layers - 3", "num_layers - 2"),
    ),
    *noticed_by(
        partial(test_its_logits_are_those_of_its_authors_method, who="z-lab"),
        ("decode.formats.blocks:read_dflash", "slots if is_anchor else slots - 1", "slots"),
    ),
    *noticed_by(
        partial(test_a_bad_folder_is_refused_by_its_description, name="a program"),
        ("decode.formats.weights:read_pickle", "weights_only=True", "weights_only=0"),
    ),
    *noticed_by(
        test_one_row_of_another_target_is_found_when_the_target_is_loaded,
        ("decode.formats.target_rows:check_against_model", "differing += ", "differing = 0 * "),
    ),
]


@pytest.mark.slow  # they test the tests
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_is_noticed(fault: Fault, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(fault, request, monkeypatch)
