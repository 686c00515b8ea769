"""The stage from corpus to records, against the target itself."""

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from decode import generate
from decode.common.checked_json import read_json
from decode.common.errors import ConfigError, InputError
from decode.common.progress import Progress
from decode.common.sweep_table import Row, comparison
from decode.config import ModelConfig
from decode.models.describe import describe_model
from decode.models.fingerprint import weights_fingerprint
from decode.models.output_head import head_of
from distill.__main__ import FIGURES
from distill.config import PromptConfig, TargetConfig
from distill.corpora.config import DataConfig
from distill.corpora.corpus import unit_hash
from distill.objectives.target_distribution import Dense, Sparse
from distill.records.config import RecordsConfig
from distill.records.record_folder import RecordFolder, RecordWriter
from distill.records.record_shards import Record
from distill.runtimes.transformers_runtime import TransformersRuntime
from distill.sequences import record_sequences
from distill.stage import run
from distill.target_passes import ModelPasses, Passes
from distill.time_spent import Stopwatch
from distill.told_texts import ToldTexts
from tests.architectures import CONFIGS
from tests.distill.runs import ALL_STORES, check_alike, kept, shard_files, tiny_config
from tests.tiny import save_tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with every store."""
    folder = tmp_path_factory.mktemp("distill")
    run(tiny_config(folder))
    return folder


@pytest.fixture(scope="module")
def records(folder: Path) -> RecordFolder:
    target = describe_model(ModelConfig(path=str(folder / "target")))
    return RecordFolder.open(folder / "records", target)


@pytest.fixture(scope="module")
def target(folder: Path):  # noqa: ANN201
    return AutoModelForCausalLM.from_pretrained(folder / "target").eval()


def test_the_manifest_names_the_weights_that_made_the_records(records: RecordFolder, target) -> None:  # noqa: ANN001
    assert records.manifest.target.weights == weights_fingerprint(target)


def test_a_sweep_compares_runs_by_what_their_records_count_and_where_the_time_went(folder: Path) -> None:
    table = comparison([Row({}, folder / "records", "finished")], FIGURES)
    assert "| starting | writing | reading |" in re.sub(" +", " ", table)
    assert " - " not in table
    seconds = read_json(folder / "records" / "manifest.json")["spent"]
    assert all(seconds[part] > 0 for part in ("writing", "reading"))


def test_a_part_within_another_counts_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 4.0, 6.0])
    monkeypatch.setattr("distill.time_spent.time.perf_counter", lambda: next(times))
    watch = Stopwatch()
    with watch.part("writing"), watch.part("starting"):
        pass
    assert watch.seconds == {"starting": 3.0, "writing": 3.0, "reading": 0.0}


def test_records_of_two_targets_are_not_mixed(tmp_path: Path) -> None:
    """The files under target.path were replaced while the run lay unfinished."""
    run(tiny_config(tmp_path))
    (tmp_path / "records" / "manifest.json").unlink()
    next((tmp_path / "records" / "shards").glob("*-00001.json")).unlink()
    save_tiny_target(tmp_path / "target", seed=1)
    with pytest.raises(InputError, match="records of two targets would be mixed"):
        run(tiny_config(tmp_path, resume="auto"))


def test_a_record_says_where_it_comes_from(records: RecordFolder) -> None:
    assert len(records) == 13
    assert [records.split_of(index) for index in range(13)] == ["train"] * 10 + ["validation"] * 3
    assert records.indices("validation").tolist() == [10, 11, 12]
    record = records.read(11)
    assert record.meta["prompt"] == 11
    assert record.meta["turn"] == 0
    assert record.meta["document"].startswith("corpus.jsonl:")
    assert record.meta["prompt_end"] == 6
    assert record.meta["finish_reason"] in ("length", "eos")
    assert record.meta["seed"] == 0
    assert records.manifest.counts.tokens == records.lengths.sum()
    assert record.loss_mask.tolist() == [False] + [True] * (len(record.ids) - 1)


def test_responses_are_what_the_target_writes_alone_with_the_same_noise(records: RecordFolder, target) -> None:  # noqa: ANN001
    """A text does not depend on the batch and shard it was made in."""
    seed = int(unit_hash("turn", 0, 0) * 2**31)
    for index in (0, 5, 12):
        record = records.read(index)
        prompt = torch.from_numpy(record.ids[: record.meta["prompt_end"]])[None]
        alone = generate(target, None, prompt, max_new_tokens=8, seed=seed, rows=[index])
        assert alone.sequences[0, : int(alone.lengths[0])].tolist() == record.ids.tolist()


def test_every_store_holds_the_target_s_distribution(records: RecordFolder, target) -> None:  # noqa: ANN001
    for store in ALL_STORES:
        source = record_sequences(records, "train", max_length=64, store=store)
        for index in range(len(source)):
            sequence = source[index]
            length = len(sequence.ids)
            distribution = source.collate([(sequence, 1, 2)], (2, 20), "cpu", head=head_of(target))
            assert distribution is not None
            rows = torch.arange(20 + 2, 20 + 2 + length - 1)
            assert distribution.has(torch.arange(40)).nonzero().squeeze(-1).tolist() == rows.tolist()
            with torch.no_grad():
                exact = target(torch.from_numpy(sequence.ids)[None]).logits[0, :-1].log_softmax(-1)
            found = distribution.chunk(rows)
            if isinstance(found, Dense):
                assert torch.allclose(found.log_p, exact, atol=0.01)
            else:
                kept = exact.gather(-1, found.ids)
                assert float((found.log_p - kept).abs().max()) < 0.005
                assert_weights(store, found, exact)


def assert_weights(store: str, found: Sparse, exact: torch.Tensor) -> None:
    best = exact.exp().topk(8 if store == "head_tail" else 5).values
    head = found.weight[:, : best.shape[1]]
    assert torch.allclose(head, best, rtol=0.006)
    tail = found.weight[:, best.shape[1] :]
    if store == "head_tail":
        assert torch.allclose(tail.sum(-1), 1 - best.sum(-1), rtol=0.02, atol=1e-5)
    else:
        assert tail.shape[1] == 0


@pytest.mark.slow
def test_stores_one_by_one_hold_the_same_rows_as_together(folder: Path, records: RecordFolder) -> None:
    for store in ALL_STORES:
        kept = RecordsConfig(store=[store], topk=5, shard_size=4)  # type: ignore[list-item]
        run(tiny_config(folder, f"only_{store}", records=kept))
        alone = RecordFolder.open(folder / f"only_{store}")
        for index in (0, 12):
            one, all_ = alone.read(index), records.read(index)
            assert (one.ids == all_.ids).all()
            for name, rows in one.payload.items():
                assert (rows == all_.payload[name]).all()


def test_bytes_on_disk_are_as_planned(folder: Path, capsys: pytest.CaptureFixture) -> None:
    config = tiny_config(folder, "planned", plan=True, show=2)
    run(config)
    told = capsys.readouterr().out
    assert not Path(config.output_dir).exists()
    assert "prompts               10 train, 3 validation" in told
    assert "tokens, at most       182, of which are learned: 169" in told
    assert "⟦... the target's response ...⟧" in told
    per_token = (2 + 1) + (12 * 2 + 21) + (5 * 2 + 9) + 300 * 2 + 32 * 4  # id and mask, sparse, sparse, full, hidden
    assert f"bytes a token         {per_token} " in told
    manifest = read_json(folder / "records" / "manifest.json")
    assert manifest["bytes_per_learned_token"] == per_token
    counts = manifest["counts"]
    beside = counts["bytes"] - counts["learned_tokens"] * per_token
    assert 13 * 3 < beside < 13 * 8 + 4 * 3000  # first tokens, headers and columns


def test_a_finished_folder_is_not_written_twice(folder: Path) -> None:
    before = shard_files(folder / "records")
    with pytest.raises(ConfigError, match="resume=auto"):
        run(tiny_config(folder))
    run(tiny_config(folder, resume="auto"))
    assert shard_files(folder / "records") == before


def test_another_shard_size_and_batch_size_write_the_same_records(folder: Path, records: RecordFolder) -> None:
    kept = RecordsConfig(store=["head_tail"], shard_size=7)
    run(tiny_config(folder, "regrouped", records=kept, batch_size=5))
    other = RecordFolder.open(folder / "regrouped")
    for index in range(13):
        assert (other.read(index).ids == records.read(index).ids).all()


def test_text_as_it_is_and_prompts_that_are_not_learned(folder: Path) -> None:
    config = tiny_config(folder, "as_is", responses="corpus")
    config.data = replace(config.data, learn_prompt=False)
    run(config)
    records = RecordFolder.open(config.output_dir)
    record = records.read(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    text = Path(config.data.path or "").read_text()
    assert tokenizer.decode(record.ids) in text
    assert record.loss_mask.tolist() == [False] * 6 + [True] * 8
    assert len(record.payload["full.log_p"]) == 8
    assert record.meta["finish_reason"] == "corpus"


def test_conversations_are_answered_turn_by_turn(tmp_path: Path) -> None:
    """Each answer stands in the next turn's prompt; only answers are learned; the corpus's own answers are gone."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    save_tiny_target(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    lines = []
    for number in range(20):
        said = [("user", f"Hi {number}"), ("assistant", "gone"), ("user", "Go on")]
        turns = [{"role": role, "content": content} for role, content in said]
        lines.append({"messages": turns if number % 2 else turns[:1]})
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = DataConfig(name="jsonl", path=str(tmp_path / "chat.jsonl"), validation_share=0.2, heldout_share=0.0)
    run(tiny_config(tmp_path, data=data, prompts=PromptConfig(count=6, validation_count=1)))
    records = RecordFolder.open(tmp_path / "records")
    found = [records.read(index) for index in range(len(records))]
    assert len({record.meta["prompt"] for record in found}) == 7
    followed = 0
    for before, after in zip(found, found[1:], strict=False):
        assert not before.loss_mask[: before.meta["prompt_end"]].any()
        assert before.loss_mask[before.meta["prompt_end"] :].all()
        if after.meta["turn"] == 1:
            followed += 1
            answer = str(tokenizer.decode(before.ids[before.meta["prompt_end"] :], skip_special_tokens=True))
            prompt = str(tokenizer.decode(after.ids[: after.meta["prompt_end"]]))
            assert re.fullmatch(
                rf"\[user\]Hi \d+\[assistant\]{re.escape(answer)}\[user\]Go on\[assistant\]", prompt, re.S
            )
    assert followed > 0


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"target": TargetConfig()}, "target.path is not set"),
        ({"prompts": PromptConfig(tokens=250)}, "do not fit into the 256 positions"),
        ({"data": DataConfig(name="jsonl", path="missing.jsonl")}, "missing.jsonl does not exist"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_written(folder: Path, fields: dict, told: str) -> None:
    config = tiny_config(folder, "refused", **fields)
    if "prompts" in fields:
        lines = [json.dumps({"text": f"{number} " + "word " * 2000}) + "\n" for number in range(40)]
        Path(config.data.path or "").with_name("long.jsonl").write_text("".join(lines))
        config.data = replace(config.data, path=str(folder / "long.jsonl"))
    with pytest.raises((ConfigError, InputError), match=told):
        run(config)
    assert not (folder / "refused").exists()


def test_a_disk_that_is_too_small_and_shards_that_are_too_big_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.recording_plan.MAX_SHARD_BYTES", 1000)
    with pytest.raises(ConfigError, match="use records.shard_size=1 or less"):
        run(tiny_config(folder, "refused"))
    monkeypatch.undo()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(ConfigError, match="GB free"):
        run(tiny_config(folder, "refused"))
    assert not (folder / "refused").exists()


def test_max_length_cuts_text_and_distribution_alike(records: RecordFolder) -> None:
    source = record_sequences(records, "validation", max_length=7, store="full")
    sequence = source[0]
    assert source.lengths.tolist() == [7, 7, 7]
    assert sequence.payload is not None
    assert len(sequence.payload["full.log_p"]) == 6
    assert np.count_nonzero(sequence.loss_mask) == 6
    with pytest.raises(ConfigError, match="holds the stores"):
        record_sequences(records, "train", max_length=7, store="nothing")


def test_no_text_is_read_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and rounds hold every state; reading each text again took 63 of 170 s with a model of 135M."""
    with monkeypatch.context() as patch:
        patch.setattr(ModelPasses, "of_batch", lambda *_: pytest.fail("a text was read again"))
        run(tiny_config(tmp_path, "once", records=kept("bf16")))
    read, of_batch = [], ModelPasses.of_batch

    def counted(self: ModelPasses, batch: list) -> object:
        read.extend(batch)
        return of_batch(self, batch)

    monkeypatch.setattr(ModelPasses, "of_batch", counted)
    monkeypatch.setattr(TransformersRuntime, "_layers", lambda self: ())
    run(tiny_config(tmp_path, "twice", records=kept("bf16")))
    assert len(read) == 13
    check_alike(tmp_path / "once", tmp_path / "twice")


def test_prompts_count_as_their_responses_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was by shards: no line for five minutes where prompts were long."""
    told: list[int] = []
    update = Progress.update
    monkeypatch.setattr(Progress, "update", lambda self, by, **shown: told.append(by) or update(self, by, **shown))
    run(tiny_config(tmp_path, records=RecordsConfig(shard_size=13)))
    assert sum(told) == 13
    assert max(told) == 1


@pytest.mark.parametrize("responses", ["target", "corpus"])
def test_the_bar_tells_the_tokens_that_were_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, responses: str
) -> None:
    """Of texts of a corpus, of which no response ends, it told 0 a second."""
    told: list[ToldTexts] = []
    shard = ToldTexts.shard
    monkeypatch.setattr(ToldTexts, "shard", lambda self, *given: told.append(self) or shard(self, *given))
    run(tiny_config(tmp_path, responses=responses))
    assert told[-1].tokens == RecordFolder.open(tmp_path / "records").manifest.counts.learned_tokens


def test_the_target_goes_on_while_a_shard_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first shard is on its way until texts of the second one end; what the disk refuses ends the run."""
    went_on, told = threading.Event(), list[int]()
    write, ended = RecordWriter.write, ToldTexts.ended

    def slow(self: RecordWriter, index: int, records: list[Record]) -> object:
        assert index or went_on.wait(60), "nothing was written meanwhile"
        return write(self, index, records)

    def tell(self: ToldTexts, *given: Any) -> None:
        told.append(len(told))
        if len(told) > 5:
            went_on.set()
        ended(self, *given)

    def refused(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(ToldTexts, "ended", tell)
    monkeypatch.setattr(RecordWriter, "write", slow)
    run(tiny_config(tmp_path, "ahead", records=RecordsConfig(shard_size=5)))
    monkeypatch.setattr(RecordWriter, "write", write)
    run(tiny_config(tmp_path, "again", records=RecordsConfig(shard_size=5)))
    assert shard_files(tmp_path / "ahead") == shard_files(tmp_path / "again")
    monkeypatch.setattr(RecordWriter, "write", refused)
    with pytest.raises(OSError, match="no space left"):
        run(tiny_config(tmp_path, "full", records=RecordsConfig(shard_size=13)))


def test_a_plan_counts_the_memory_of_the_rows_that_write(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save_tiny_target(tmp_path / "target", num_layers=3)
    run(tiny_config(tmp_path, batch_size=2_000_000, plan=True))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    cache = model(torch.zeros(1, 1, dtype=torch.long), use_cache=True).past_key_values
    entries = sum(part.numel() for layer in cache.layers for part in (layer.keys, layer.values))
    held = 2_000_000 * 14 * entries * 4 / 1e9
    assert f"{held:.1f} of keys and values of 2000000 rows of 14 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "is_known"), [("qwen3_moe", True), ("dbrx", False)])
def test_experts_are_recorded_whether_or_not_their_cache_is_known_beforehand(
    tmp_path: Path, capsys: pytest.CaptureFixture, name: str, is_known: bool
) -> None:
    """A pass without values ended in a traceback where experts were eager, or not in bfloat16."""
    tokenizer = tiny_tokenizer()
    fields = CONFIGS[name] | {"vocab_size": 300, "eos_token_id": tokenizer.eos_token_id}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields)).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    run(tiny_config(tmp_path, batch_size=2_000_000, plan=True))
    told = capsys.readouterr().out
    assert (f"{2_000_000 * 14 * 64 * 4 / 1e9:.1f} of keys and values" in told) == is_known
    assert ("not known of this architecture" in told) != is_known
    run(tiny_config(tmp_path))
    assert len(RecordFolder.open(tmp_path / "records")) == 13


def test_finished_texts_are_read_so_many_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cache of the rows that write beside it, a pass over 128 rows of 2,048 tokens would not fit on a card."""
    monkeypatch.setattr("distill.target_passes.MOST_TOKENS", 20)

    class Sizes(Passes):
        batch_size = 3

        def of_batch(self, batch: list[Record]) -> Any:
            return [len(record.ids) for record in batch]

    records = [Record(np.zeros(size), np.zeros(size, bool), {}) for size in (9, 4, 30, 5, 4, 4, 10)]
    assert list(Sizes().over(records)) == [[4, 4, 4], [5, 9], [10], [30]]
