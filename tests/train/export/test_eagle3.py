"""EAGLE-3 heads as one folder for five engines: its names and keys, a reduced vocabulary, and what each refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from decode.common.checked_json import read_json
from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.drafters.head_draft import HeadDraft
from decode.formats.eagle3 import manifest
from decode.models.describe import describe_model
from decode.models.hidden_states import FINAL
from tests.tiny import tiny_tokenizer
from tests.train.export.saved_heads import check_described, export, save_head, save_padded_target
from train.export.config import ExportConfig, SavedDraftConfig
from train.export.engines import ENGINES
from train.export.engines.base import Launch, Loads
from train.export.loadable import foreseen
from train.export.stage import run

TAPS = (1, 3, 4)
VOCAB = torch.arange(0, 320, 3)
PLAIN: dict[str, Any] = {"fc_norm": False, "norm_before_fc": False, "norm_output": False}
ALL = ("vllm", "sglang", "trtllm", "llamacpp", "speculators")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_padded_target(tmp_path_factory.mktemp("target") / "model")


def save(tmp_path: Path, target: Path, name: str = "eagle3", vocab: Tensor | None = None, **fields: Any) -> HeadDraft:
    return save_head(tmp_path / "head", target, name, vocab, **{"taps": TAPS} | fields)


def exported(tmp_path: Path, form: str = "vllm", **given: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return export(tmp_path / "head", tmp_path / f"for {form}", form, **given)


@pytest.mark.parametrize("vocab", [None, VOCAB], ids=["full", "reduced"])
@pytest.mark.parametrize("name", ["eagle3", "eagle3.1", "eagle3.1-one-norm"])
def test_config_json_calls_for_what_the_folder_holds(
    tmp_path: Path, target: Path, name: str, vocab: Tensor | None
) -> None:
    save(tmp_path, target, name, vocab)
    fields, tensors = exported(tmp_path)
    check_described(fields, tensors, "vllm", "eagle3")
    norms = {"eagle3": set(), "eagle3.1": {f"fc_norm.{at}.weight" for at in range(3)}}.get(name, {"input_norm.weight"})
    maps = set() if vocab is None else {"d2t", "t2d"}
    ends = {"fc.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight"}
    assert {key for key in tensors if not key.startswith("layers.0.")} == ends | norms | maps
    assert sum(key.startswith("layers.0.") for key in tensors) == 10


@pytest.mark.parametrize("name", ["eagle3", "eagle3.1"])
def test_which_engines_will_load_it_is_known_before_it_is_trained(tmp_path: Path, target: Path, name: str) -> None:
    """As an export says it of the head itself."""
    head = save(tmp_path, target, name)
    first, *others = foreseen("eagle3", head.config, describe_model(ModelConfig(path=str(target))))
    run(ExportConfig(format="all", output_dir=str(tmp_path / "all"), draft=SavedDraftConfig(str(tmp_path / "head"))))
    (written,) = tmp_path.glob("all/*/draftsmith_export.json")
    titles = read_json(written)["engines"]
    assert [ENGINES[one].title for one in first.removeprefix("engines that load it: ").split(", ")] == titles
    assert any("does not know fc_norm" in one for one in others) == (name == "eagle3.1")


def test_a_reduced_vocabulary_maps_back_to_the_targets(tmp_path: Path, target: Path) -> None:
    save(tmp_path, target, vocab=VOCAB)
    _, tensors = exported(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(target)
    assert torch.equal(torch.arange(len(VOCAB)) + tensors["d2t"], VOCAB)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], VOCAB)
    assert torch.equal(tensors["lm_head.weight"], theirs.lm_head.weight[VOCAB])
    assert torch.equal(tensors["embed_tokens.weight"], theirs.model.embed_tokens.weight)


def test_a_vocabulary_of_every_token_is_no_reduced_one(tmp_path: Path, target: Path) -> None:
    """vLLM refuses the folder's d2t where the draft has as many tokens as the target."""
    save(tmp_path, target, vocab=torch.arange(320))
    fields, tensors = exported(tmp_path)
    assert fields["draft_vocab_size"] == 320
    assert not {"d2t", "t2d"} & tensors.keys()


@pytest.mark.parametrize("name", ["eagle3.1", "eagle3.1-one-norm"])
def test_states_are_read_low_to_high_whatever_the_order_of_taps(tmp_path: Path, target: Path, name: str) -> None:
    head = save(tmp_path, target, name, taps=(4, 1, 3))
    fields, tensors = exported(tmp_path)
    assert fields["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    ours, width = head.state_dict(), 32
    for new, old in enumerate((1, 2, 0)):
        there, here = slice(new * width, (new + 1) * width), slice(old * width, (old + 1) * width)
        assert torch.equal(tensors["fc.weight"][:, there], ours["fc.weight"][:, here])
        if name == "eagle3.1":
            assert torch.equal(tensors[f"fc_norm.{new}.weight"], ours[f"fc_norm.{old}.weight"])
        else:
            assert torch.equal(tensors["input_norm.weight"][there], ours["input_norm.weight"][here])


def test_half_the_precision_is_for_weights_alone(tmp_path: Path, target: Path) -> None:
    head = save(tmp_path, target, "eagle3.1", VOCAB)
    fields, tensors = exported(tmp_path, dtype="bfloat16")
    assert fields["dtype"] == fields["torch_dtype"] == fields["transformer_layer_config"]["dtype"] == "bfloat16"
    check_described(fields, tensors, "vllm", "eagle3")
    assert torch.equal(tensors["fc.weight"], head.state_dict()["fc.weight"].bfloat16())


def test_one_folder_serves_all_engines(tmp_path: Path, target: Path) -> None:
    save(tmp_path, target, **PLAIN)
    run(ExportConfig("all", str(tmp_path / "out"), SavedDraftConfig(str(tmp_path / "head"))))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["eagle3"]
    card = (tmp_path / "out/eagle3/README.md").read_text()
    assert all(ENGINES[name].title in card for name in ALL)


def test_the_older_name_of_the_layer_becomes_the_one_that_is_written() -> None:
    """Of folders made elsewhere; engines and the library go by different ones."""
    older = "midlayer.self_attn.q_proj.weight"
    for name in ("vllm", "sglang", "llamacpp"):
        rules = loads(name).names
        assert rules.renamed(older) == rules.renamed("layers.0.self_attn.q_proj.weight")
    assert loads("trtllm").names.renamed("layers.0.self_attn.q_proj.weight") == older
    assert loads("speculators").names.renamed(older) == older, "it does not know it"


def test_the_manifest_counts_listed_states_where_their_number_is_absent() -> None:
    layer = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 64, "head_dim": 4, "num_attention_heads": 2}
    fields = {
        **layer,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "draft_vocab_size": 32,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4],
    }
    specs = manifest(fields)
    assert specs["fc.weight"].shape == (8, 16)
    assert specs["layers.0.self_attn.k_proj.weight"].shape == (4, 16)
    assert (specs["d2t"].shape, specs["t2d"].shape, specs["lm_head.weight"].shape) == ((32,), (64,), (32, 8))
    assert manifest(fields | {"eagle_aux_hidden_state_layer_ids": None})["fc.weight"].shape == (8, 24), "three"


def loads(engine: str) -> Loads:
    how = ENGINES[engine].forms["eagle3"]
    assert isinstance(how, Loads)
    return how


def test_launch_commands_name_the_method_and_the_states() -> None:
    how = Launch("TARGET", Path("FOLDER"), 3, taps=(2, 16, 29))
    assert '"method": "eagle3"' in loads("vllm").launch(how)
    assert "--speculative-algorithm EAGLE3" in loads("sglang").launch(how), "EAGLE accepts nothing, without an error"
    assert loads("speculators").launch(how) == "vllm serve FOLDER"
    gguf = loads("llamacpp").launch(how).splitlines()
    assert "--target-model-dir TARGET" in gguf[1]
    assert "--spec-type draft-eagle3" in gguf[2]
    fetched, *gguf = loads("llamacpp").launch(replace(how, target="org/model")).splitlines()
    assert fetched == "hf download org/model --local-dir target", "the converter takes folders alone"
    assert "--target-model-dir target" in gguf[1]
    text = loads("trtllm").launch(how).split("<<'END'\n")[1].split("END")[0]
    told = yaml.safe_load(text)["speculative_config"]
    assert (told["decoding_type"], told["eagle3_layers_to_capture"]) == ("Eagle3", [1, 15, 28]), "layers' outputs"


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize(("taps", "lacking"), [((0, 2, 4), 0), ((1, 3, 6), 6), ((1, 3, FINAL), FINAL)])
def test_states_that_engines_do_not_hand_over(
    tmp_path: Path, target: Path, engine: str, taps: tuple[int, ...], lacking: int
) -> None:
    save(tmp_path, target, taps=taps, **PLAIN)
    with pytest.raises(InputError, match=rf"1 to 5, not \[{lacking}\].* draft.head.taps"):
        exported(tmp_path, engine)
    assert not (tmp_path / f"for {engine}").exists()


@pytest.mark.parametrize(
    ("engine", "fields", "message"),
    [
        ("llamacpp", {"norm_output": True}, "norm_output of EAGLE-3.1, .* it with draft.head.norm_output=false"),
        ("llamacpp", {"fc_norm": True}, "draft.head.fc_norm=false"),
        ("llamacpp", {"taps": (1, 4)}, r"three hidden states, and this head reads 2 \(\[1, 4\]\)"),
        ("trtllm", {"taps": (4,)}, r"leaves fc out .* a single hidden state \(4\); train it with two or more"),
    ],
)
def test_heads_that_one_engine_does_not_load(
    tmp_path: Path, target: Path, engine: str, fields: dict[str, Any], message: str
) -> None:
    save(tmp_path, target, **PLAIN | fields)
    with pytest.raises(InputError, match=message):
        exported(tmp_path, engine)
    exported(tmp_path, "vllm")


def save_gemma(folder: Path) -> Path:
    tokenizer = tiny_tokenizer(300)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "head_dim": 8, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None}
    torch.manual_seed(0)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = AutoModelForCausalLM.from_config(Gemma3TextConfig(**shape, **heads, **ends))  # type: ignore[arg-type]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_gemma_has_its_scaled_embedding_and_one_way_in_vllm(tmp_path: Path) -> None:
    gemma = save_gemma(tmp_path / "gemma")
    save(tmp_path, gemma, **PLAIN, rope={"rope_type": "default", "rope_theta": 1e6})
    for engine in ("vllm", "speculators"):
        with pytest.raises(
            InputError, match="own gemma3_text was not seen to hand over hidden states; give model_impl=transform"
        ):
            exported(tmp_path, engine)
    for engine in ("sglang", "trtllm", "llamacpp"):
        with pytest.raises(InputError, match="of the types llama, mistral, qwen3, and this one is gemma3_text"):
            exported(tmp_path, engine)
    _, tensors = exported(tmp_path, "vllm", model_impl="transformers")
    embedding = AutoModelForCausalLM.from_pretrained(gemma).model.embed_tokens
    assert torch.equal(tensors["embed_tokens.weight"], embedding(torch.arange(300)))
    assert not torch.equal(tensors["embed_tokens.weight"], embedding.weight)
    assert "--model-impl transformers" in (tmp_path / "for vllm/README.md").read_text()
