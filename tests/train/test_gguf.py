"""Drafts for a target in a GGUF file, from its records to what engines are told of it."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode import generate, load_drafter
from decode.common.errors import InputError
from decode.config import DecodeConfig, DrafterConfig, ModelConfig
from decode.drafters.saved_draft import describe_draft
from decode.models.compatibility import load_tokenizer, token_map_hash
from decode.models.describe import describe_model
from decode.models.load import load_model
from decode.sampling.config import SamplingConfig
from decode.stage import run as decode
from distill.engines.vllm_support import check_draft
from tests.bad_configurations import good_commands
from tests.commands import ROOT, main_of
from tests.decode.test_gguf import FAULTS
from tests.gguf_files import CHATML, write_gguf
from tests.tiers import by_default
from tests.tiny import tiny_llama, tiny_tokenizer
from tests.train.toy import head_config, tiny_config, write_corpus, write_records
from train.config import TrainConfig
from train.export.config import ExportConfig, Format, SavedDraftConfig
from train.export.stage import run as export
from train.stage import run as train

IDS = torch.tensor([[5, 17, 203, 4, 88, 31, 9, 120]])
BRIEF: dict[str, Any] = {"steps": 2, "validate_every": 2, "checkpoint_every": 2}


Call = Callable[..., tuple[object, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a stage in this process: exit code, standard output and standard error."""

    def run(stage: str, *words: str) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", [stage, *words])
        with pytest.raises(SystemExit) as ended:
            main_of(stage)()
        told = capsys.readouterr()
        return ended.value.code, told.out, told.err

    return run


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf(tmp_path_factory.mktemp("target") / "model.gguf")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    folder = tmp_path_factory.mktemp("records")
    corpus = write_corpus(folder / "corpus")
    return write_records(folder / "records", target, corpus, ["head_tail"], {"layers": [-1]})


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory, target: Path, records: Path) -> Path:
    return trained(tiny_config(tmp_path_factory.mktemp("lm") / "run", target, records=str(records), **BRIEF))


def gguf(file: Path, seed: int = 1) -> Path:
    """A target of 320 tokens, of which its tokenizer has 300."""
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = CHATML
    return write_gguf(file, tiny_llama(320, hidden_size=64, num_layers=3, num_heads=4, seed=seed), tokenizer)


def trained(config: TrainConfig) -> Path:
    train(config)
    return Path(config.output_dir) / "model"


def exported(draft: Path, output: Path, form: Format, target: Path | None = None) -> Path:
    asked = ModelConfig(path=None if target is None else str(target))
    export(ExportConfig(format=form, output_dir=str(output), draft=SavedDraftConfig(path=str(draft)), target=asked))
    return output


@pytest.mark.slow
def test_a_head_learns_from_records_of_a_file_and_drafts_for_that_file_alone(
    tmp_path: Path, target: Path, records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = trained(head_config(tmp_path / "run", target, "mtp", records=str(records), **BRIEF))
    asked = {"target": ModelConfig(path=str(target)), "prompt": "def f(x):", "color": "never"}
    texts = []
    for path in (str(draft), None):
        sampling = SamplingConfig(max_new_tokens=8, temperature=0.0)
        decode(DecodeConfig(**asked, draft=DrafterConfig(path=path), decode=sampling))  # type: ignore[arg-type]
        texts.append(capsys.readouterr().out.splitlines()[0])
    assert texts[0] == texts[1]
    other = load_model(ModelConfig(path=str(gguf(tmp_path / "other" / "model.gguf", seed=8))))
    with pytest.raises(InputError, match="was trained on the hidden states of"):
        load_drafter(draft, target=other)


@pytest.mark.parametrize("init_from", [False, True])
def test_a_draft_model_has_the_tokenizer_of_a_file(
    tmp_path: Path, target: Path, records: Path, lm: Path, init_from: bool
) -> None:
    if init_from:
        start = {"init_from": str(target), "pruning": {"layers": 2}}
        lm = trained(tiny_config(tmp_path / "run", target, records=str(records), draft=start, **BRIEF))
        assert json.loads((lm / "config.json").read_text())["num_hidden_layers"] == 2
    ours, theirs = load_tokenizer(ModelConfig(path=str(lm))), load_tokenizer(ModelConfig(path=str(target)))
    assert token_map_hash(ours) == token_map_hash(theirs)
    assert ours("def f(x): <eos>")["input_ids"] == theirs("def f(x): <eos>")["input_ids"]
    assert (ours.chat_template, ours.eos_token_id) == (CHATML, theirs.eos_token_id)
    model = load_model(ModelConfig(path=str(target)))
    asked = {"max_new_tokens": 8, "temperature": 1.0, "seed": 3}
    plain = generate(model, None, IDS, **asked).sequences
    assert torch.equal(generate(model, load_drafter(lm, target=model), IDS, **asked).sequences, plain)


def test_llamacpp_takes_the_file_as_it_is_and_other_engines_want_a_folder(
    tmp_path: Path, target: Path, lm: Path
) -> None:
    card = (exported(lm, tmp_path / "all", "all") / "lm" / "README.md").read_text()
    assert f"llama-server -m {target} -md draft.gguf" in card
    assert f"convert_hf_to_gguf.py {target}" not in card
    for other in ("vllm serve", "sglang", "trtllm", "from_pretrained"):
        assert other not in card
    for form in ("vllm", "sglang", "trtllm", "transformers"):
        with pytest.raises(InputError, match=r"is a GGUF file, .*give target\.path=FOLDER"):
            exported(lm, tmp_path / form, form)  # type: ignore[arg-type]
        assert not (tmp_path / form).exists()
    load_model(ModelConfig(path=str(target))).save_pretrained(tmp_path / "folder")
    load_tokenizer(ModelConfig(path=str(target))).save_pretrained(tmp_path / "folder")
    card = (exported(lm, tmp_path / "vllm", "vllm", tmp_path / "folder") / "README.md").read_text()
    assert f"vllm serve {tmp_path / 'folder'}" in card


def test_a_head_for_a_file_fits_the_folder_of_the_same_weights(tmp_path: Path, target: Path, records: Path) -> None:
    """In one file or in several, and no folder of other weights."""
    draft = trained(head_config(tmp_path / "run", target, "medusa", records=str(records), **BRIEF))
    for form in ("vllm", "all"):
        with pytest.raises(InputError, match=r"is a GGUF file, .*unpack_gguf\.py"):
            exported(draft, tmp_path / "out", form)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    unpack = runpy.run_path(str(ROOT / "scripts/unpack_gguf.py"))["unpack"]
    unpack(str(target), tmp_path / "folder")
    unpacked = load_model(ModelConfig(path=str(tmp_path / "folder")))
    unpacked.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    load_tokenizer(ModelConfig(path=str(target))).save_pretrained(tmp_path / "shards")
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 1
    for name in ("folder", "shards"):
        exported(draft, tmp_path / f"of_{name}", "vllm", tmp_path / name)
    texts = []
    for model in (unpacked, load_model(ModelConfig(path=str(target)))):
        out = generate(model, load_drafter(draft, target=model), IDS, max_new_tokens=8, seed=3)
        texts.append((out.sequences.tolist(), out.stats.tau))
    assert texts[0] == texts[1]
    unpack(str(gguf(tmp_path / "other.gguf", seed=8)), tmp_path / "other")
    with pytest.raises(InputError, match="was trained on the hidden states of"):
        exported(draft, tmp_path / "of_other", "vllm", tmp_path / "other")
    with pytest.raises(InputError, match="exists already"):
        unpack(str(target), tmp_path / "other")


def test_the_card_of_a_training_loads_the_file_as_a_file(target: Path, lm: Path) -> None:
    card = (lm / "README.md").read_text()
    assert f"target = load_model(ModelConfig({json.dumps(str(target))}))" in card
    assert f"AutoModelForCausalLM.from_pretrained({json.dumps(str(target))}" not in card
    assert "vllm serve" not in card
    lines = card.split("```python\n")[1].split("```")[0].splitlines()
    code = "\n".join(lines[: lines.index("# transformers")]).replace("THIS_FOLDER", str(lm))
    exec(code, {"input_ids": IDS})  # noqa: S102 - the commands are run as they are shown


NAMED = [
    ("distill", "target.path"),
    ("datastore", "target.path"),
    ("train", "draft.init_from"),
    ("decode", "target.path"),
    ("decode", "draft.path"),
    ("eval", "target.path"),
    ("eval", "drafts.one"),
    ("export", "target.path"),
]
BAD = ("cut in its weights", "another kind of file", "of the future", "of an architecture that is not read")


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return good_commands(tmp_path_factory.mktemp("commands"))


@pytest.mark.parametrize(("stage", "key"), by_default(3, NAMED))
def test_a_bad_file_ends_a_command_before_anything_is_written(
    tmp_path: Path, commands: dict[str, list[str]], call: Call, stage: str, key: str
) -> None:
    for bad in BAD:
        make, told = FAULTS[bad]
        file = make(gguf(tmp_path / "model.gguf"))
        code, _, shown = call(stage, *commands[stage], f"{key}={file}", f"output_dir={tmp_path / 'out'}")
        assert code == 2, shown
        assert re.search(told, shown), shown
        assert not (tmp_path / "out").exists()


def test_a_file_drafts_for_a_folder_with_one(tmp_path: Path, target: Path, call: Call) -> None:
    asked = [f"target.path={target.parent}", "prompt=def", "chat=true", "decode.max_new_tokens=8", "color=never"]
    (ended, plain, _), (code, drafted, shown) = (
        call("decode", *asked, *more) for more in ([], [f"draft.path={gguf(tmp_path / 'draft.gguf', seed=5)}"])
    )
    assert (ended, code) == (0, 0), shown
    assert drafted.splitlines()[0] == plain.splitlines()[0] != ""


@pytest.mark.parametrize("stage", ["decode", "distill"])
def test_a_file_without_a_chat_template_reads_no_chats(tmp_path: Path, call: Call, stage: str) -> None:
    file = write_gguf(tmp_path / "a.gguf", tiny_llama(320), tiny_tokenizer(300))
    asked = {"decode": ["prompt=def", "chat=true"], "distill": ["data=everyday", f"output_dir={tmp_path / 'out'}"]}
    code, _, shown = call(stage, f"target.path={file}", *asked[stage])
    assert code == 2
    assert re.search(r"a\.gguf has no(ne| chat template); (use an instruct model|drop chat=true)", shown), shown
    assert not (tmp_path / "out").exists()


def test_vllm_is_handed_folders(tmp_path: Path, target: Path, commands: dict[str, list[str]], call: Call) -> None:
    asked = [*commands["distill"], f"target.path={target}", "target.runtime=vllm", f"output_dir={tmp_path / 'out'}"]
    code, _, shown = call("distill", *asked)
    assert code == 2
    assert "is a GGUF file, and target.runtime=vllm is handed a folder" in shown
    with pytest.raises(InputError, match="is a GGUF file, and target.runtime=vllm is handed a folder"):
        check_draft(describe_draft(str(target), describe_model(ModelConfig(str(target)))), str(target), 1)


def test_a_report_is_planned(tmp_path: Path, target: Path, lm: Path, call: Call) -> None:
    few = ["lossless.prompts=3", "timing.prompts=3", "prompts.tokens=16", "decode.max_new_tokens=16"]
    words = [f"target.path={target}", f"drafts.one={lm}", "plan=true", "lossless.tokens=16", *few]
    code, told, shown = call("eval", *words, f"output_dir={tmp_path / 'report'}")
    assert code == 0, shown
    assert "prompts" in told
