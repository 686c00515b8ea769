"""Hidden states from a run to a batch: their codes, how far off they are, and texts of one run scored by another."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from decode.common.checked_json import read_json, write_json
from decode.common.errors import ConfigError, InputError
from distill.config import DistillConfig, PromptConfig, TargetConfig
from distill.corpora.config import DataConfig
from distill.records.config import FeatureCodeName, FeatureConfig, RecordsConfig
from distill.records.feature_codes import CODES, FeatureCode, FeatureLayout, grid_of, off_grid, on_grid
from distill.records.feature_fitting import CODE_FILE, LONG, calibrate, code_bytes
from distill.records.record_folder import RecordFolder
from distill.records.record_shards import Record
from distill.sequences import record_sequences
from distill.stage import run
from distill.target_passes import ModelPasses
from tests.commands import built
from tests.distill.runs import LAYERS, check_alike, kept, shard_files, tiny_config
from tests.tiny import save_tiny_target, tiny_llama, tiny_tokenizer
from train.batches import PackedSource

THREE, WIDTH = [2, 0, -1], 24
CPU = torch.device("cpu")


def states_of(seed: int, tokens: int = 600) -> Tensor:  # (N, n, d)
    """Correlated channels, layers of unlike length, one channel large in every token, and noise."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(10, len(THREE) * WIDTH, generator=torch.Generator().manual_seed(0))
    rows = torch.randn(tokens, 10, generator=generator) @ mixing
    rows += 0.1 * torch.randn(rows.shape, generator=generator)
    states = rows.unflatten(1, (len(THREE), WIDTH)) * torch.tensor([0.1, 1.0, 20.0])[:, None]
    states[:, 1, 5] += 300
    return states


def fitted(code: FeatureCodeName, states: Tensor, **options: int) -> FeatureCode:
    layout = FeatureLayout.of(FeatureConfig(THREE, code, **options), WIDTH)
    assert layout is not None
    return CODES[code](layout, load(code_bytes(layout, states, CPU)) if layout.is_fitted else {})


def test_bf16_keeps_the_bits() -> None:
    states = states_of(1).bfloat16()
    code = fitted("bf16", states)
    assert torch.equal(code.decode(code.encode(states), THREE), states)
    assert not code.squared_errors(states, code.encode(states)).any()


@pytest.mark.parametrize("code", ["bf16", "int8", "pca"])
def test_some_layers_are_read_without_the_others(code: FeatureCodeName) -> None:
    """In any order, from no more arrays than they need, with the same values as together."""
    states = states_of(1)
    one = fitted(code, states)
    arrays = one.encode(states)
    assert {name: (tuple(array.shape[1:]), array.numpy().dtype) for name, array in arrays.items()} == one.layout.shapes
    together = one.decode(arrays, THREE)
    for layers, places in (([-1, 2], [2, 0]), ([0], [1])):
        needed = {name: arrays[name] for name in one.layout.names_of(layers)}
        torch.testing.assert_close(one.decode(needed, layers), together[:, places], rtol=1e-2, atol=1e-3)
    assert one.layout.names_of([]) == []


def test_int8_errs_by_half_a_step_of_the_channel() -> None:
    seen, unseen = states_of(1), states_of(2)
    code = fitted("int8", seen)
    for states, is_seen in ((seen, True), (unseen, False)):
        arrays = code.encode(states)
        stretch = torch.stack([arrays[f"features.{layer}.stretch"] for layer in THREE], 1).float()
        error = (code.decode(arrays, THREE, torch.float32) - states).abs()
        bound = stretch[..., None] * code.fitted["step"] / 2
        assert (error <= bound * 1.01 + 1e-5 * states.abs()).all()
        assert (stretch == 1).all() == is_seen
        assert stretch.max() < 2
    spread = seen.amax(0) - seen.amin(0)
    torch.testing.assert_close(code.fitted["step"], spread / 254)  # of each channel, its offset set aside


def test_a_token_beyond_all_others_costs_them_nothing_and_is_kept() -> None:
    plain, odd = states_of(1), states_of(1)
    odd[::60, 2, 3] = 9000.0
    for name in ("int8", "pca"):
        code = fitted(name, odd)
        errors = code.squared_errors(odd, code.encode(odd)).sqrt()
        before = fitted(name, plain)
        usual = before.squared_errors(plain, before.encode(plain)).sqrt().mean()
        assert errors[::60, 2].max() < 0.02
        others = torch.arange(len(odd)) % 60 > 0
        assert errors[others].mean() < 1.3 * usual


def test_the_error_of_pca_is_the_dropped_variance_and_that_of_the_grid() -> None:
    """|y - y_hat|^2 = |y|^2 - |z|^2 + |z - z_hat|^2, and the first difference is the sum of the least eigenvalues."""
    states = states_of(1)
    code = fitted("pca", states, components=7)
    y = code.standardised(states).double()  # type: ignore[attr-defined]
    assert (y.norm(dim=-1) < LONG * y.norm(dim=-1).median()).all()  # else its row would have counted less in the fit
    torch.testing.assert_close(y.mean(0), torch.zeros_like(y[0]), atol=1e-4, rtol=0)
    dropped = torch.linalg.eigvalsh(y.T @ y)[:-7].sum()
    basis = code.fitted["basis"].double()
    torch.testing.assert_close(basis @ basis.T, torch.eye(7, dtype=torch.float64), atol=1e-5, rtol=0)
    decoded = code.decode(code.encode(states), THREE, torch.float32)
    y_hat = code.standardised(decoded).double()  # type: ignore[attr-defined]
    of_grid = (y @ basis.T - y_hat @ basis.T).square().sum()
    torch.testing.assert_close((y - y_hat).square().sum(), dropped + of_grid, rtol=1e-3, atol=0)
    assert of_grid < 0.01 * dropped
    wider = fitted("pca", states, components=10)  # as many as there are causes: what is left is noise
    assert wider.squared_errors(states, wider.encode(states)).mean() < 0.05


@pytest.mark.parametrize(("code", "size"), [("bf16", 30_720), ("int8", 15_372), ("pca", 2_562)])
def test_bytes_a_token(code: FeatureCodeName, size: int) -> None:
    """Five layers and the final state of a Qwen3-4B: n d 2, n (d + 2), n d / 6 + 2."""
    layout = FeatureLayout.of(FeatureConfig([1, 9, 17, 25, 33, -1], code), 2560)
    assert layout is not None
    assert layout.bytes_per_token == size


def test_too_few_tokens_for_the_components_are_refused() -> None:
    with pytest.raises(InputError, match="have 12 tokens, too few for 12 components"):
        fitted("pca", states_of(1, tokens=12))
    assert fitted("pca", states_of(1, tokens=13)).fitted["basis"].shape == (12, 72)


def test_a_row_within_the_grid_is_rounded_and_one_beyond_it_stretched() -> None:
    middle, step = torch.tensor([0.0, 10.0, 0.0]), torch.tensor([1.0, 0.5, 2.0])
    rows = torch.tensor([[100.0, 10.2, -3.2], [-254.0, 12.0, 3.6]])
    codes, stretch = on_grid(rows, middle, step)
    assert codes.tolist() == [[100, 0, -2], [-127, 2, 1]]
    assert stretch.tolist() == [1.0, 2.0]
    assert (codes.dtype, stretch.dtype) == (torch.int8, torch.float16)
    assert off_grid(codes, stretch, middle, step).tolist() == [[100.0, 10.0, -4.0], [-254.0, 12.0, 4.0]]


def test_a_grid_reaches_from_the_least_to_the_most_and_is_never_too_fine() -> None:
    """127 steps to each side; the third channel hardly moved, and gets a hundredth of the median step."""
    grid = grid_of(torch.tensor([-127.0, 0.0, 7.0]), torch.tensor([127.0, 508.0, 7.0]))
    assert grid["middle"].tolist() == [0.0, 254.0, 7.0]
    assert grid["step"].tolist() == pytest.approx([1.0, 2.0, 0.01])


def test_an_error_is_weighed_against_the_deviation_from_the_mean() -> None:
    """bfloat16 does not hold 257: 256 is kept, off by 1 where the token deviates by 2 from the mean."""
    layout = FeatureLayout([0, 4], 2, "bf16", 0)
    code = CODES["bf16"](layout, {"mean": torch.tensor([[255.0, 3.0], [0.0, 0.0]])})
    states = torch.tensor([[[257.0, 3.0], [3.0, 4.0]]])
    assert code.squared_errors(states, code.encode(states)).tolist() == [[1 / 4, 0.0]]


ORDINARY = torch.tensor([[3.0, 4.0], [3.0, -4.0], [-3.0, 4.0], [-3.0, -4.0]])


@pytest.mark.parametrize(("length", "reach"), [(17.5, 17.5), (22.5, 4.0)])
def test_a_channel_reaches_as_far_as_ordinary_tokens_do(length: float, reach: float) -> None:
    """All but one token are 5 long; 3.5 times that is ordinary, 4.5 times is not."""
    states = torch.cat([ORDINARY, ORDINARY, torch.tensor([[0.0, length]])])[:, None]
    code = load(code_bytes(FeatureLayout([0], 2, "int8", 0), states, CPU))
    assert code["step"][0].tolist() == pytest.approx([6 / 254, (4 + reach) / 254])
    assert code["middle"][0].tolist() == pytest.approx([0.0, (reach - 4) / 2])
    assert code["mean"][0].tolist() == pytest.approx([0.0, 17.5 / 9 if reach == length else 0.0])


def test_layers_count_alike_however_long_their_states_are() -> None:
    """The spread is that of ordinary tokens: sqrt((4 * 9 + 4 * 16) / 8) = sqrt(12.5), and ten times that."""
    layer = torch.cat([ORDINARY, torch.tensor([[300.0, 400.0]])])
    code = load(code_bytes(FeatureLayout([0, 1], 2, "pca", 1), torch.stack([layer, 10 * layer + 7], 1), CPU))
    assert code["spread"].tolist() == pytest.approx([12.5**0.5, 10 * 12.5**0.5])
    torch.testing.assert_close(code["mean"], torch.tensor([[0.0, 0.0], [7.0, 7.0]]))


def test_a_code_is_fitted_to_no_more_tokens_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of 6 tokens each: the first two begin among the first 10 tokens, the third does not."""
    monkeypatch.setattr("distill.records.feature_fitting.MOST_TOKENS", 10)
    layout, target = FeatureLayout([0], 32, "int8", 0), tiny_llama()
    texts = [Record(np.arange(6) + 6 * n, np.ones(6, dtype=bool), {"document": str(n)}) for n in range(3)]
    fits = [load(calibrate(layout, texts[:count], ModelPasses(target, [0], 2)))["mean"][0] for count in (1, 2, 3)]
    assert torch.equal(fits[1], fits[2])
    embeddings = target.model.embed_tokens.weight.detach()
    torch.testing.assert_close(fits[0], embeddings[:6].mean(0))
    torch.testing.assert_close(fits[1], embeddings[:10].mean(0))


EVERY_CODE: list[FeatureCodeName] = ["bf16", "int8", "pca"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of every code, and one without hidden states."""
    folder = tmp_path_factory.mktemp("features")
    run(tiny_config(folder, "none"))
    for code in EVERY_CODE:
        run(tiny_config(folder, code, records=kept(code)))
    return folder


def again(folder: Path, source: str, output: str, **fields: object) -> DistillConfig:
    """A run that scores the texts in `source` again."""
    own = {
        "target": TargetConfig(path=str(folder / "target")),
        "responses": "records",
        "from_records": str(folder / source),
        "batch_size": 3,
        "output_dir": str(folder / output),
    }
    return DistillConfig(**own | fields)  # type: ignore[arg-type]


def exact(folder: Path, ids: np.ndarray) -> torch.Tensor:  # (T, layers, d)
    model = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    with torch.no_grad():
        states = model(torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states
    return torch.stack([states[layer][0] for layer in LAYERS], 1)  # the last of transformers' states is the normed one


@pytest.mark.parametrize(("code", "error"), [("bf16", 0.004), ("int8", 0.03), ("pca", 0.9)])
def test_every_token_has_the_states_of_the_target(folder: Path, code: FeatureCodeName, error: float) -> None:
    records = RecordFolder.open(folder / code)
    source = record_sequences(records, "train", 64, layers=LAYERS)
    sequence, other = source[0], source[3]
    states = source.features([(sequence, 1, 4), (other, 0, 0)], (2, 20), LAYERS)
    assert states is not None
    assert states.dtype == torch.bfloat16
    assert states.shape == (2, 20, len(LAYERS), 32)
    length = len(sequence.ids)
    wanted = exact(folder, sequence.ids)
    found = states[1, 4 : 4 + length].float()
    gaps = (found - wanted).square().sum(-1) / wanted.square().sum(-1)
    assert gaps.mean().sqrt() < error
    assert not states[1, :4].any()
    assert not states[1, 4 + length :].any()
    some = source.features([(sequence, 0, 0)], (1, length), [-1, 0])
    assert some is not None
    torch.testing.assert_close(some[0].float(), found[:, [2, 0]], rtol=1e-2, atol=1e-2)
    assert source.features([(sequence, 0, 0)], (1, length), ()) is None
    told = records.manifest.feature_errors
    assert list(told) == ["0", "1", "-1"]
    assert 0 < max(told.values()) < error


def test_bf16_is_the_state_of_the_recording_pass_to_the_bit(folder: Path) -> None:
    """last_hidden keeps it in float32."""
    records = RecordFolder.open(folder / "bf16")
    for index in range(len(records)):
        record = records.read(index)
        hidden = torch.from_numpy(record.payload["last_hidden.bits"]).view(torch.float32)
        bits = torch.from_numpy(record.features["features.-1.bits"])
        places = np.flatnonzero(record.loss_mask) - 1
        assert torch.equal(bits[places].view(torch.bfloat16), hidden.bfloat16())
        assert len(bits) == len(record.ids)


def test_hidden_states_change_neither_texts_nor_distributions(folder: Path) -> None:
    plain, more = (RecordFolder.open(folder / name) for name in ("none", "pca"))
    for index in range(len(plain)):
        before, after = plain.read(index), more.read(index)
        assert (before.ids == after.ids).all()
        assert all((rows == after.payload[name]).all() for name, rows in before.payload.items())


def test_a_batch_brings_the_layers_that_were_asked_for(folder: Path) -> None:
    source = record_sequences(RecordFolder.open(folder / "int8"), "train", 9, layers=(1, -1))
    packed = PackedSource.of(source, 32, seed=0, layers=(-1, 1))
    batch = packed.batch([0, 1])
    assert batch.features is not None
    assert batch.features.shape == (2, 32, 2, 32)
    assert (batch.features.abs().sum((2, 3)) > 0).tolist() == (batch.document >= 0).tolist()
    first = source[packed.rows[1][0]]
    alone = source.features([(first, 0, 0)], (1, len(first.ids)), (-1, 1))
    assert alone is not None
    assert len(first.ids) == 9
    assert torch.equal(batch.features[1, :9], alone[0])
    assert PackedSource.of(source, 32, seed=0).batch([0]).features is None


@pytest.mark.parametrize("code", EVERY_CODE)
def test_texts_scored_again_give_what_their_writing_gave(folder: Path, code: FeatureCodeName) -> None:
    run(again(folder, "none", f"again_{code}", records=kept(code)))
    check_alike(folder / f"again_{code}", folder / code)
    ours, theirs = (read_json(folder / name / "manifest.json") for name in (f"again_{code}", code))
    assert (ours["code_file"] is None) == (theirs["code_file"] is None)
    assert ours["config"]["data"] == theirs["config"]["data"]  # by which other stages know what was held out
    assert ours["responses"] == "target"
    assert ours["from_records"]["path"] == str(folder / "none")
    assert len(RecordFolder.open(folder / f"again_{code}")) == len(RecordFolder.open(folder / code))


def test_scoring_again_can_be_killed_and_plans_first(folder: Path, capsys: pytest.CaptureFixture) -> None:
    config = again(folder, "none", "half", records=kept("pca"), resume="auto")
    run(config)
    shutil.copytree(folder / "half", folder / "whole")
    for name in ("manifest.json", "shards/shard-00001.json", "shards/shard-00002.safetensors", CODE_FILE):
        (folder / "half" / name).unlink()
    run(config)
    assert shard_files(folder / "half") == shard_files(folder / "whole")
    config = again(folder, "none", "planned", records=kept("pca"), plan=True, show=1)
    run(config)
    told = capsys.readouterr().out
    assert not Path(config.output_dir).exists()
    assert "prompts               10 train, 3 validation" in told
    assert "pca features of 3 layers 18 of every token, text 3)" in told
    assert "in 4 shards" in told
    assert told.startswith("--- corpus.jsonl:")


def test_shards_of_another_code_are_written_again(folder: Path) -> None:
    shutil.copytree(folder / "int8", folder / "recoded")
    (folder / "recoded" / "manifest.json").unlink()
    shards = folder / "recoded" / "shards"
    for note in shards.glob("*.json"):
        write_json(note, read_json(note) | {"code_file": {"file": CODE_FILE, "sha256": "another"}})
    for shard in shards.glob("*.safetensors"):
        os.utime(shard, (0, 0))
    run(tiny_config(folder, "recoded", records=kept("int8"), resume="auto"))
    assert shard_files(folder / "recoded") == shard_files(folder / "int8")
    assert all(shard.stat().st_mtime > 0 for shard in shards.glob("*.safetensors"))


def test_conversations_without_a_record_leave_their_shards_as_they_are(tmp_path: Path) -> None:
    """Shards hold prompts by their number, of which some have no record."""
    save_tiny_target(tmp_path / "target")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "target")
    contents = [f"{number}" * (200 if number % 3 else 4) for number in range(1, 30)]
    lines = [json.dumps({"messages": [{"role": "user", "content": content}]}) for content in contents]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    data = DataConfig(name="jsonl", path=str(tmp_path / "chat.jsonl"), validation_share=0.1, heldout_share=0.0)
    fields = {"data": data, "prompts": PromptConfig(count=20, validation_count=0), "records": kept("bf16")}
    run(tiny_config(tmp_path, **fields))
    records = RecordFolder.open(tmp_path / "records")
    assert len(records) < 20
    run(again(tmp_path, "records", "again", records=kept("bf16")))
    check_alike(tmp_path / "again", tmp_path / "records")


def test_a_folder_without_the_layers_names_the_remedy(folder: Path) -> None:
    records = RecordFolder.open(folder / "bf16")
    with pytest.raises(InputError, match=r"holds the hidden states \[0, 1, -1\], and the draft reads \[0, 2\]") as told:
        record_sequences(records, "train", 64, layers=(0, 2))
    assert "records.features.layers=[0,1,-1,2]" in str(told.value)
    assert "records.topk=5" in str(told.value)  # p is kept as it was
    with pytest.raises(InputError, match="of no layer.*target_source=live"):
        record_sequences(RecordFolder.open(folder / "none"), "train", 64, layers=(0,))


@pytest.mark.parametrize("there", ["none", "int8"])
def test_the_command_that_is_named_writes_what_is_missing(folder: Path, tmp_path: Path, there: str) -> None:
    """It used to leave out the target, and to write into the default folder."""
    source = RecordFolder.open(shutil.copytree(folder / there, tmp_path / there))
    with pytest.raises(InputError) as told:
        record_sequences(source, "train", 64, layers=(2, -1))
    command, output_dir = re.findall(r"`(python -m distill .*)` and train with records=(\S+), or", str(told.value))[0]
    cfg = built("distill", shlex.split(command)[3:])
    assert isinstance(cfg, DistillConfig)
    run(cfg)
    found = RecordFolder.open(output_dir)
    store = record_sequences(found, "train", 64, layers=(2, -1)).store
    assert store is not None
    assert store.name == source.layout.store[0]
    assert found.layout.store == source.layout.store
    assert (found.read(3, layers=()).ids == source.read(3, layers=()).ids).all()


@pytest.mark.parametrize("damage", ["missing", "altered"])
def test_a_code_that_is_not_the_run_s_is_refused(folder: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(folder / "int8", tmp_path / "copy")
    file = tmp_path / "copy" / CODE_FILE
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    with pytest.raises(InputError, match=f"{CODE_FILE} is missing" if damage == "missing" else "its bytes changed"):
        RecordFolder.open(tmp_path / "copy")


def test_what_a_target_cannot_give_is_refused_before_it_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.runtimes.transformers_runtime.load_model", None)
    with pytest.raises(InputError, match=r"hidden states \[0, 7\] are asked of .* has 2 layers"):
        run(tiny_config(folder, "refused", records=RecordsConfig(features=FeatureConfig([0, 7]))))
    features = FeatureConfig(LAYERS, "pca", components=96)
    few = tiny_config(folder, "refused", records=RecordsConfig(features=features), prompts=PromptConfig(6, 1, 1, 1))
    with pytest.raises(ConfigError, match="96 components of the hidden states cannot be fitted to 28 tokens"):
        run(few)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=300, eos_token_id=None, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    )
    gpt2.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    with pytest.raises(InputError, match="gpt2 model, whose hidden states heads cannot be built on"):
        run(tiny_config(tmp_path, records=kept("bf16")))
    assert not (tmp_path / "records").exists()
    assert not (folder / "refused").exists()


def test_a_shard_is_as_big_as_its_hidden_states_make_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distill.recording_plan.MAX_SHARD_BYTES", 10_000)
    own = {"store": ["head_tail"], "shard_size": 4}
    run(tiny_config(folder, "refused", plan=True, records=RecordsConfig(**own)))  # type: ignore[arg-type]
    own["features"] = FeatureConfig(LAYERS)
    with pytest.raises(ConfigError, match=r"use records.shard_size=\d or less, or keep less than .*hidden states"):
        run(tiny_config(folder, "refused", plan=True, records=RecordsConfig(**own)))  # type: ignore[arg-type]


def test_texts_of_another_target_are_refused(folder: Path, tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "target", seed=1)
    config = again(folder, "none", "refused", target=TargetConfig(path=str(tmp_path / "target")))
    with pytest.raises(InputError, match="was recorded from .* with fingerprint"):
        run(config)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"responses": "records"}, "needs from_records"),
        ({"from_records": "some/records"}, "set responses=records"),
        (
            {"responses": "records", "from_records": "some/records", "prompts": PromptConfig(count=3)},
            r"prompts\.\* was set",
        ),
    ],
)
def test_texts_come_from_one_place(fields: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DistillConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"layers": [1, 1]}, "names a layer twice"),
        ({"code": "int8"}, "keeps none"),
        ({"layers": [1], "components": 4}, "is for code=pca"),
        ({"layers": [1], "calibration_prompts": 0}, "calibration_prompts=0"),
        ({"layers": [1], "code": "pca", "components": 0}, "components=0"),
    ],
)
def test_bad_settings_of_features_are_refused(fields: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        FeatureConfig(**fields)
