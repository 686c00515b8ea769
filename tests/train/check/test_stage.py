"""`python -m train.check` and the check that `python -m train.export` runs: what they refuse, and what they tell."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decode.common.errors import InputError
from decode.config import ModelConfig
from tests.commands import ROOT
from tests.engines.faults import edit_tensors, random, renamed, replaced, setting, unset
from tests.train.check.folders import Folders, config_of, subject_of
from train.check import agreement
from train.check.__main__ import main
from train.check.agreement import Rounds, measure
from train.check.checks import CHECKS, findings
from train.check.config import FEWEST, CheckConfig, ServedDraftConfig
from train.check.folder import FILE, open_folder
from train.check.names import names_and_shapes
from train.check.stage import engines_of, run
from train.export import stage as export
from train.export.engines import ENGINES

Call = Callable[..., tuple[object, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folders: Folders) -> Call:
    """(exit code, what was said) of the command for the llama target."""

    def check(folder: Path, *more: str) -> tuple[object, str]:
        arguments = [f"draft.path={folder}", f"target.path={folders.target('llama')}", "tokens=0", *more]
        monkeypatch.setattr(sys, "argv", ["draftsmith-check", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().err

    return check


def settings(folders: Folders, folder: Path, **given: Any) -> CheckConfig:
    target = ModelConfig(path=str(folders.target("llama")), device="cpu")
    return CheckConfig(draft=ServedDraftConfig(path=str(folder)), target=target, **given)


def test_a_whole_folder_has_a_line_for_each_check(folders: Folders, call: Call) -> None:
    code, shown = call(folders.exported("llama", "eagle3-reduced"))
    assert code == 0
    names = ("target", "names", "types", "values", "states", "vocabulary", "head", "tokens", "keys", "rope", "rows")
    assert all(f"ok: {name}: " in shown for name in names)
    assert "edited" not in shown


def test_files_that_were_edited_since_the_export_are_named(folders: Folders, call: Call, tmp_path: Path) -> None:
    folder = shutil.copytree(folders.exported("llama", "eagle3-reduced"), tmp_path / "copy")
    setting(norm_output=False)(folder)
    (folder / "README.md").write_text("of one's own")
    code, shown = call(folder)
    assert code == 0
    assert "wrote it (draftsmith_export.json): config.json. What" in shown


def test_a_masks_states_may_be_stored_in_any_shape_and_not_in_part(folders: Folders, tmp_path: Path) -> None:
    """The speculators library writes them as (1, 1, n), and vLLM lays them out anew."""
    folder = folders.copied("llama", "peagle", tmp_path / "out")
    held = load_file(folder / "model.safetensors")
    for states, faults in ((held["mask_hidden"][None], 0), (held["mask_hidden"][:, 1:], 1)):
        save_file(held | {"mask_hidden": states.contiguous()}, folder / "model.safetensors")
        found = list(names_and_shapes(subject_of(folder, folders.target("llama"), "vllm")))
        assert len(found) == faults, found


def test_all_faults_are_told_at_once(folders: Folders, call: Call, tmp_path: Path) -> None:
    folder = folders.copied("llama", "eagle3", tmp_path / "out")
    replaced("embed_tokens", random)(folder)
    renamed(r"^fc\.", lambda _: "encoder.fc.")(folder)
    setting(vocab_size=320)(folder)
    unset("eagle_aux_hidden_state_layer_ids")(folder)
    code, shown = call(folder)
    assert code == 2
    for words in (
        "names: tensors that config.json calls for are missing: d2t, fc.weight: vLLM 0.32 leaves them random",
        "names: tensors that vLLM 0.32 does not know",
        "vocabulary: vocab_size=320, and the target's is 300",
        "states: config.json has no eagle_aux_hidden_state_layer_ids",
        "rows of embed_tokens.weight are not those of the target's embedding",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: shutil.rmtree(folder), "is not a folder here"),
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("{}"), "neither a known draft head"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no *.safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 64), "damaged or missing"),
        (setting(hidden_size="64"), "hidden_size is '64'"),
        (setting(eagle_config=[1]), "eagle_config is [1]"),
        (setting(eagle_aux_hidden_state_layer_ids=[1.5]), "eagle_aux_hidden_state_layer_ids[0] is 1.5"),
        (lambda folder: shutil.copy(folder / "model.safetensors", folder / "twice.safetensors"), "lies in"),
        (partial(edit_tensors, lambda found: found.update(x=torch.zeros(2, dtype=torch.uint8))), "of type U8"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",  # addresses of functions differ from worker to worker
)
def test_what_is_not_a_draft_ends_with_a_message(
    folders: Folders, call: Call, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    folder = folders.copied("llama", "eagle3", tmp_path / "out")
    damage(folder)
    code, shown = call(folder)
    assert code == 2, shown
    assert words in shown
    assert "Traceback" not in shown


def test_what_cannot_be_checked_ends_with_a_message(folders: Folders, call: Call, tmp_path: Path) -> None:
    head = folders.draft("llama", "eagle3")
    for arguments, words in [
        ((head,), f"python -m train.export draft.path={head}"),
        ((folders.exported("llama", "medusa"), "format=sglang"), "SGLang has no Medusa heads"),
        ((folders.exported("llama", "medusa"), f"target.path={tmp_path}/none"), "does not exist"),
        ((folders.exported("llama", "medusa"), "target.path=null"), "target.path is null"),
        ((folders.exported("llama", "medusa"), "tokens=-1"), "must be at least 0"),
        ((folders.exported("llama", "medusa"), "tokens=4"), "tokens=4 are too few"),
    ]:
        code, shown = call(*arguments)
        assert code == 2
        assert words in shown


def test_a_folder_without_keys_that_sizes_come_from_is_told_so(folders: Folders, call: Call, tmp_path: Path) -> None:
    folder = folders.copied("llama", "eagle3", tmp_path / "out")
    unset("intermediate_size")(folder)
    code, shown = call(folder)
    assert code == 2
    assert "config.json does not say which tensors there are (KeyError: 'intermediate_size')" in shown


def test_names_are_those_of_each_engine(folders: Folders, tmp_path: Path) -> None:
    """The older names of EAGLE-3 are known to all but the speculators library, which leaves the layer random."""
    folder = folders.copied("llama", "eagle3", tmp_path / "out")
    renamed(r"^layers\.0\.", lambda _: "midlayer.")(folder)
    for engine, is_known in [("vllm", True), ("sglang", True), ("trtllm", True), ("speculators", False)]:
        found = {one.check for one in findings(subject_of(folder, folders.target("llama"), engine))}
        assert found == (set() if is_known else {"names"})


def test_a_folder_in_parts_is_read_whole(folders: Folders, tmp_path: Path) -> None:
    folder = folders.copied("llama", "eagle3", tmp_path / "out")
    weights, parts = load_file(folder / "model.safetensors"), {}
    for number, names in enumerate((list(weights)[::2], list(weights)[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: weights[name] for name in names}, folder / file)
        parts |= dict.fromkeys(names, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert not findings(subject_of(folder, folders.target("llama"), "vllm"))
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(InputError, match=r"lacks model-1\.safetensors"):
        subject_of(folder, folders.target("llama"), "vllm")


def test_somebody_elses_output_head_may_have_learned(folders: Folders, tmp_path: Path) -> None:
    """EAGLE-3 heads are published with one of their own; the embedding is the target's in all."""
    folder = folders.copied("llama", "eagle3", tmp_path / "out")
    (folder / FILE).unlink()
    replaced("lm_head", random)(folder)
    assert not findings(subject_of(folder, folders.target("llama"), "vllm"))
    replaced("embed_tokens", random)(folder)
    assert {one.check for one in findings(subject_of(folder, folders.target("llama"), "vllm"))} == {"rows"}


def test_a_folder_of_the_speculators_library_is_read_by_its_rules(folders: Folders, tmp_path: Path) -> None:
    folder = folders.copied("llama", "eagle3", tmp_path / "out")
    written = json.loads((folder / "config.json").read_text())
    flat = {"draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "target_hidden_size", "num_aux_hidden_states"}
    flat |= {"norm_before_residual", "speculators_model_type", "speculators_config", "transformer_layer_config"}
    own = {name: value for name, value in written.items() if name in flat} | {"target_hidden_size": None}
    (folder / "config.json").write_text(json.dumps(own))
    assert not findings(subject_of(folder, folders.target("llama"), "vllm"))
    (unread,) = findings(subject_of(folder, folders.target("llama"), "sglang"))
    assert "SGLang 0.5.23 cannot read such folders" in unread.effect
    unset("norm_before_residual")(folder)
    (found,) = findings(subject_of(folder, folders.target("llama"), "vllm"))
    assert found.check == "keys"
    assert "vLLM takes true for folders of the speculators library" in found.effect


@pytest.mark.parametrize("draft", ["eagle3", "medusa", "dflash", "dspark", "lm"])
def test_the_fewest_tokens_are_enough(folders: Folders, draft: str) -> None:
    settings_of = partial(settings, folders, folders.exported("llama", draft))
    subject = subject_of(folders.exported("llama", draft), folders.target("llama"), "vllm")
    assert {one.check for one in measure(subject, settings_of(tokens=FEWEST, prompts=1))} <= {"agreement"}


def test_heads_of_more_layers_and_with_the_norms_of_qwen3_are_known(folders: Folders, tmp_path: Path) -> None:
    folder = folders.copied("llama", "eagle3", tmp_path / "out")

    def add(found: dict[str, torch.Tensor]) -> None:
        found |= {f"layers.0.self_attn.{one}_norm.weight": torch.ones(8) for one in "qk"}
        second = {name.replace("rs.0", "rs.1"): one for name, one in found.items() if name.startswith("layers.0.")}
        narrower = tuple(f"{one}_proj.weight" for one in "qkv")
        found |= {name: (one[:, :64] if name.endswith(narrower) else one).clone() for name, one in second.items()}

    edit_tensors(add, folder)
    setting(num_hidden_layers=2, architectures=["Eagle3Qwen3ForCausalLM"])(folder)
    subject = subject_of(folder, folders.target("llama"), "vllm")
    assert not findings(subject)
    assert not list(measure(subject, settings(folders, folder)))


def test_a_folder_of_the_authors_of_dspark_leaves_its_layout_unsaid(folders: Folders, tmp_path: Path) -> None:
    folder = folders.copied("llama", "dspark", tmp_path / "out")
    (folder / FILE).unlink()
    unset("sample_from_anchor")(folder)
    assert not findings(subject_of(folder, folders.target("llama"), "vllm"))


def test_every_check_is_explained() -> None:
    page = (ROOT / "docs/reference/export_checks.md").read_text()
    rows = set(re.findall(r"^\| (\w+) \|", page, flags=re.MULTILINE)) - {"check"}
    assert rows == {one.name for one in CHECKS} | {"logits", "agreement"}


def test_an_export_with_a_fault_leaves_nothing(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, damage = export.write_one, replaced("o_proj", lambda found: found * 1.001)

    def write_wrongly(source: Any, layout: Any, engines: Any, draft: Path, model_impl: str) -> None:
        write(source, layout, engines, draft, model_impl)
        damage(draft)

    monkeypatch.setattr(export, "write_one", write_wrongly)
    with pytest.raises(InputError, match=r"(?s)nothing was written.*logits of the folder read back differ"):
        export.run(config_of(folders.draft("llama", "eagle3"), tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_the_target_as_its_own_draft_is_accepted_whole(folders: Folders, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run(settings(folders, folders.target("llama"), tokens=24, prompts=2))
    # 20 places of each text, a round of 4 tokens and one more at a time
    assert "8 rounds, accepted by position [8, 8, 8, 8]" in caplog.text


@pytest.mark.parametrize("draft", ["eagle3-reduced", "medusa", "dflash", "dspark"])
def test_a_draft_that_is_never_accepted_is_a_fault(folders: Folders, draft: str) -> None:
    with pytest.raises(InputError, match="agreement: next to nothing is accepted"):
        run(settings(folders, folders.exported("llama", draft), tokens=24, prompts=2))


def test_a_draft_model_whose_json_says_nonsense_is_told(folders: Folders, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folders.target("llama"), tmp_path / "copy"))
    (copy / "generation_config.json").write_text("[]")
    with pytest.raises(InputError, match="cannot be run as a draft model .* tokens=0 to leave this out"):
        run(settings(folders, copy))


def test_states_of_the_other_convention_are_told(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {-1: Rounds(100, (20, 1)), 0: Rounds(100, (40, 10)), 1: Rounds(100, (60, 30))}
    monkeypatch.setattr(agreement, "_of_head", lambda subject, model, texts, shift: counts[shift])
    subject = subject_of(folders.exported("llama", "eagle3"), folders.target("llama"), "vllm")
    (found,) = measure(subject, settings(folders, subject.folder.path, tokens=FEWEST, prompts=1))
    assert "one layer higher than listed: 100 rounds, accepted by position [60, 30]" in found.what


def test_all_engines_of_an_export_are_those_that_it_was_written_for(tmp_path: Path) -> None:
    """One with a learned mask is for vLLM alone, and others would be said to be at fault."""
    (tmp_path / "config.json").write_text('{"model_type": "medusa", "medusa_num_heads": 1}')
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    both = [one.name for one in engines_of("all", open_folder(str(tmp_path)), "medusa")]
    assert both == ["vllm", "tgi"]
    (tmp_path / FILE).write_text(json.dumps({"engines": [ENGINES["vllm"].title]}))
    assert [one.name for one in engines_of("all", open_folder(str(tmp_path)), "medusa")] == ["vllm"]
