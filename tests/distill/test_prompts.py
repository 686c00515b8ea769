"""Prompts: a pure function of corpus and seed, drawn once, and held-out ones counted as a report will find them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from decode.common.checked_json import read_json
from decode.common.errors import InputError
from decode.config import ModelConfig
from decode.models.describe import describe_model
from distill.config import DistillConfig, PromptConfig, ResponseSampling
from distill.corpora import configured
from distill.corpora.bad_rows import BadRow
from distill.corpora.config import DataConfig
from distill.corpora.configured import load_corpus
from distill.corpora.corpus import Corpus, Document, Split
from distill.prompts.drawn_prompts import DrawnPrompt, digest, draw_prompts, turns
from distill.prompts.held_out_count import REPORT_PROMPTS, WINDOW, HeldOutCount, count_held_out
from distill.prompts.prompt_texts import PromptTexts, file_stamp, write_prompts
from distill.prompts.tokenizer import start_ids, train_bpe
from distill.records.record_folder import RecordFolder
from distill.stage import run
from eval.measure.config import LosslessConfig
from eval.prompts.config import PromptsConfig
from eval.prompts.held_out import held_out_prompts
from tests.distill.runs import shard_files, tiny_config
from tests.distill.test_responses import Stopped, stop_at
from tests.tiers import by_default
from tests.tiny import starting_tokenizer, tiny_tokenizer

SPLITS: tuple[Split, ...] = ("train", "validation", "heldout")


def corpus_file(folder: Path, words: int = 200) -> str:
    path = folder / "corpus.jsonl"
    texts = [" ".join(f"{name}{n}" for n in range(words)) for name in "abcdefghijklmnopqrst"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def config_of(path: str, **fields: object) -> DistillConfig:
    data = DataConfig(name="jsonl", path=path, validation_share=0.2, heldout_share=0.2)
    base = {"data": data, "prompts": PromptConfig(tokens=8, per_document=3, count=20, validation_count=4)}
    return DistillConfig(**base | fields)  # type: ignore[arg-type]


def collect(config: DistillConfig) -> list[DrawnPrompt]:
    return list(draw_prompts(load_corpus(config.data), tiny_tokenizer(), config))


def test_windows_come_from_their_split_and_are_numbered_through(tmp_path: Path) -> None:
    config = config_of(corpus_file(tmp_path))
    prompts = collect(config)
    split_by_text = {document.id: split for split in SPLITS for document in load_corpus(config.data).documents(split)}
    assert all(split_by_text[prompt.document] == prompt.split for prompt in prompts)
    assert [prompt.number for prompt in prompts] == list(range(24))
    assert [prompt.split for prompt in prompts] == ["train"] * 20 + ["validation"] * 4
    assert all(len(prompt.ids or []) == 8 for prompt in prompts)
    by_document = {prompt.document: [p for p in prompts if p.document == prompt.document] for prompt in prompts}
    assert max(map(len, by_document.values())) <= 3
    text = {
        f"corpus.jsonl:{n}": json.loads(line)["text"] for n, line in enumerate(Path(config.data.path or "").open(), 1)
    }
    assert all(tiny_tokenizer().decode(prompt.ids or []) in text[prompt.document] for prompt in prompts)


def test_prompts_hang_on_seed_and_corpus_alone(tmp_path: Path) -> None:
    path = corpus_file(tmp_path)
    assert digest(collect(config_of(path))) == digest(collect(config_of(path)))
    assert digest(collect(config_of(path))) != digest(collect(config_of(path, seed=1)))


def test_a_short_document_is_one_whole_prompt(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n}"}) + "\n" for n in range(40)))
    prompts = collect(config_of(str(path)))
    assert len({prompt.document for prompt in prompts}) == len(prompts)
    assert all(0 < len(prompt.ids or []) <= 2 for prompt in prompts)


def test_text_kept_as_it_is_gives_windows_of_prompt_and_response(tmp_path: Path) -> None:
    sampling = ResponseSampling(max_new_tokens=16)
    prompts = collect(config_of(corpus_file(tmp_path), responses="corpus", sampling=sampling))
    assert all(len(prompt.ids or []) == 24 for prompt in prompts)


def test_text_of_which_nothing_would_be_learned_is_no_prompt(tmp_path: Path) -> None:
    """Eight tokens are the prompt, which is not to be learned: "9 0 0 0" (7 tokens) and "10 0 0 0" leave none."""
    path = tmp_path / "short.jsonl"
    texts = [f"{n} 0 0 0{end}" for n in range(60) for end in ("", "1", " 0 0 0")]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = DataConfig(name="jsonl", path=str(path), validation_share=0, heldout_share=0, learn_prompt=False)
    prompts = collect(config_of(str(path), data=data, responses="corpus", prompts=PromptConfig(8, 1, None, 0)))
    assert min(len(prompt.ids or []) for prompt in prompts) == 9
    learned = collect(config_of(str(path), responses="corpus", prompts=PromptConfig(8, 1, None, 0)))
    assert min(len(prompt.ids or []) for prompt in learned) < 8


class OneTokenALetter:
    """A tokenizer whose token t of every text is t."""

    bos_token_id = None

    def __call__(self, texts: str | list[str], **_: object) -> dict[str, list]:
        ids = [list(range(len(text))) for text in texts]
        return {"input_ids": ids[0] if isinstance(texts, str) else ids}


def windows_of(length: int, tokens: int, count: int, **fields: object) -> list[list[int]]:
    """Where the windows of documents of `length` tokens start, two a document at most."""
    data = DataConfig(name="jsonl", path="unused", validation_share=0, heldout_share=0)
    config = config_of("unused", data=data, prompts=PromptConfig(tokens, 2, None, 0), **fields)
    corpus = Corpus(data, "here", lambda: (Document(f"d{n}", "x" * length) for n in range(count)))
    found: dict[str, list[int]] = {}
    for prompt in draw_prompts(corpus, OneTokenALetter(), config):  # type: ignore[arg-type]
        assert prompt.ids is not None
        assert prompt.ids == list(range(prompt.ids[0], prompt.ids[0] + tokens))
        found.setdefault(prompt.document, []).append(prompt.ids[0])
    return list(found.values())


def test_a_window_may_start_wherever_it_fits() -> None:
    """Ten tokens hold windows of eight at 0, 1 and 2, and which one a document's name decides."""
    starts = [start for (start,) in windows_of(10, 8, 200)]
    assert set(starts) == {0, 1, 2}
    assert all(40 < starts.count(start) < 95 for start in range(3))
    assert windows_of(8, 8, 5) == [[0]] * 5


def test_windows_of_a_document_and_of_two_runs_are_drawn_apart() -> None:
    """Two parts of 11 places each: drawn with one number, the second would start 11 behind the first every time."""
    pairs = windows_of(25, 4, 100)
    assert all(0 <= first <= 11 <= second <= 21 for first, second in pairs)
    assert len({second - first for first, second in pairs}) > 5
    assert windows_of(25, 4, 100, seed=1) != pairs


def test_a_prompt_begins_as_the_tokenizer_begins_every_text(tmp_path: Path) -> None:
    config = config_of(corpus_file(tmp_path))
    plain = collect(config)
    tokenizer = starting_tokenizer()
    started = draw_prompts(load_corpus(config.data), tokenizer, config)
    assert start_ids(tokenizer) == [tokenizer.bos_token_id]
    assert [prompt.ids for prompt in started] == [[tokenizer.bos_token_id, *(prompt.ids or [])] for prompt in plain]


def test_turns_are_where_the_assistant_is_to_speak() -> None:
    def roles(order: str) -> list[dict[str, str]]:
        names = {"s": "system", "u": "user", "a": "assistant"}
        return [{"role": names[letter], "content": letter} for letter in order]

    assert turns(roles("suaua")) == [2, 4]
    assert turns(roles("uau")) == [1, 3]
    assert turns(roles("u")) == [1]
    assert turns(roles("uaa")) == [1]
    assert turns(roles("a")) == []


def test_a_conversation_without_a_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": "Hi"}]}) + "\n")
    config = config_of(str(path))
    config.data.validation_share = config.data.heldout_share = 0.0
    with pytest.raises(InputError, match="nobody but the assistant speaks"):
        collect(config)


def test_a_trained_tokenizer_gives_every_text_back(tmp_path: Path) -> None:
    tokenizer = train_bpe(["def f(x):\n    return x"] * 3, 300)
    assert len(tokenizer) <= 300
    tokenizer.save_pretrained(str(tmp_path))
    text = "Größe = '\t你好 ✓'  # no\r\n"
    assert type(tokenizer).from_pretrained(str(tmp_path)).decode(tokenizer(text)["input_ids"]) == text  # type: ignore[index]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|pad|>")
    assert start_ids(tokenizer) == []


SAID = [{"role": "user", "content": "Größe?\n"}, {"role": "assistant", "content": "\u2028 3"}]
PROMPTS = [
    DrawnPrompt(0, "a:1", "train", ids=[5, 70_000, 2]),
    DrawnPrompt(1, "b", "train", messages=SAID),
    DrawnPrompt(2, "ç", "validation", ids=[]),
]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for every pass over the corpus."""
    passes: list[str] = []
    read = configured.FILE_READERS["jsonl"]

    def counted(path: Path, config: DataConfig) -> Iterator[Document | BadRow]:
        passes.append(str(path))
        yield from read(path, config)

    monkeypatch.setitem(configured.FILE_READERS, "jsonl", counted)
    return passes


def stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> DistillConfig:
    """A run that ended when it had written two shards of four."""
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        with pytest.raises(Stopped):
            run(tiny_config(folder))
    return tiny_config(folder, resume="auto")


def test_prompts_come_back_as_they_were_written(tmp_path: Path) -> None:
    found = write_prompts(iter(PROMPTS), tmp_path / "prompts")
    assert list(found) == PROMPTS
    assert found[1:] == PROMPTS[1:]
    assert found[:100] == PROMPTS
    assert digest(found) == digest(PROMPTS)


@pytest.mark.slow
def test_the_corpus_is_read_by_the_first_run_and_not_by_one_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    config = stopped(tmp_path, monkeypatch)
    assert len(reads) == 3  # two splits, and what is held out
    reads.clear()
    run(config)
    assert not reads
    run(tiny_config(tmp_path, "whole"))
    assert shard_files(tmp_path / "records") == shard_files(tmp_path / "whole")
    ours, theirs = (read_json(tmp_path / name / "manifest.json") for name in ("records", "whole"))
    for told in ("shards", "prompts_sha256", "held_out"):
        assert ours[told] == theirs[told]
    assert not (tmp_path / "records" / "prompts").exists()  # the records hold them now


def test_a_plan_is_of_its_own_corpus_whatever_the_folder_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(tmp_path, monkeypatch)
    run(tiny_config(tmp_path, plan=True, prompts=PromptConfig(tokens=6, per_document=2, count=7, validation_count=2)))
    assert "prompts               7 train, 2 validation" in capsys.readouterr().out


def touch(folder: Path) -> None:
    os.utime(folder / "corpus.jsonl", ns=(1, 1))


def truncate(folder: Path) -> None:
    file = folder / "records/prompts/prompts.jsonl"
    file.write_bytes(file.read_bytes()[:-7])


def alter(folder: Path) -> None:
    file = folder / "records/prompts/prompts.jsonl"
    file.write_bytes(file.read_bytes().replace(b"corpus.jsonl:", b"corpus.jsonx:", 1))


def lose(folder: Path) -> None:
    (folder / "records/prompts/starts.npy").unlink()


@pytest.mark.parametrize("change", by_default(1, [truncate, alter, touch, lose]))
def test_what_may_have_changed_is_read_again_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str], change: Callable[[Path], None]
) -> None:
    config = stopped(tmp_path, monkeypatch)
    change(tmp_path)
    reads.clear()
    run(config)
    assert len(reads) == 3
    run(tiny_config(tmp_path, "whole"))
    assert shard_files(tmp_path / "records") == shard_files(tmp_path / "whole")


def test_a_corpus_that_changed_is_refused_though_its_prompts_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stopped(tmp_path, monkeypatch)
    lines = (tmp_path / "corpus.jsonl").read_text().splitlines()
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines[::-1]))
    with pytest.raises(InputError, match="the corpus or the tokenizer changed"):
        run(config)


def test_ranks_that_are_not_the_first_read_no_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    config = stopped(tmp_path, monkeypatch)
    target = describe_model(ModelConfig(path=str(tmp_path / "target")))
    with PromptTexts(config, target) as first:
        first.read(tmp_path / "records")
        reads.clear()
        other = PromptTexts(config, target)
        other.open(tmp_path / "records")
        assert list(other.prompts) == list(first.prompts)
        assert other.num_prompts == 13
    assert not reads


def test_a_stamp_tells_of_sizes_times_and_names(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, ns=(5, 5))
    config = DataConfig("text", str(tmp_path))
    seen = [file_stamp(config)]
    os.utime(tmp_path / "a.txt", ns=(6, 6))
    seen.append(file_stamp(config))
    (tmp_path / "a.txt").write_text("longer")
    os.utime(tmp_path / "a.txt", ns=(6, 6))
    seen.append(file_stamp(config))
    (tmp_path / "a.txt").rename(tmp_path / "aa.txt")  # in the same order
    seen.append(file_stamp(config))
    assert len(set(seen)) == 4
    assert file_stamp(config) == seen[-1]
    assert file_stamp(DataConfig("hub", "some/dataset")) is None
    assert file_stamp(DataConfig()) == file_stamp(DataConfig("tasks"))  # both are made of the library


def corpus_of(folder: Path, rows: list[dict]) -> DataConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(name="jsonl", path=str(path), heldout_share=0.3)


def chat(number: int) -> dict:
    return {"messages": [{"role": "user", "content": f"Question {number}?"}, {"role": "assistant", "content": "Yes."}]}


def text(number: int) -> dict:
    return {"text": f"{number} " + "def value return " * (30 * (number % 3))}


@pytest.mark.parametrize("row", [chat, text])
def test_it_counts_the_prompts_that_a_report_makes(tmp_path: Path, row) -> None:  # noqa: ANN001
    data, tokenizer = corpus_of(tmp_path, [row(number) for number in range(60)]), tiny_tokenizer()
    held_out = list(load_corpus(data).documents("heldout"))
    found = count_held_out(load_corpus(data), tokenizer)
    asked = PromptsConfig()
    assert (WINDOW, REPORT_PROMPTS) == (asked.tokens, LosslessConfig().prompts)
    assert found.is_all
    assert 0 < found.documents == len(held_out)
    assert found.prompts == len(held_out_prompts(iter(held_out), tokenizer, asked, 1000, seed=0)) < REPORT_PROMPTS


def test_it_stops_where_a_report_has_enough(tmp_path: Path) -> None:
    data = corpus_of(tmp_path, [chat(number) for number in range(1000)])
    corpus = load_corpus(data)
    read = 0

    def counted():  # noqa: ANN202
        nonlocal read
        for document in corpus.read():
            read += 1
            yield document

    found = count_held_out(replace(corpus, read=counted), tiny_tokenizer())
    assert (found.prompts, found.is_all) == (REPORT_PROMPTS, False)
    assert read < 500
    assert found.line().startswith("at least 96 documents")
    assert found.warning(0.3) is None


def test_only_the_documents_that_are_read_count(tmp_path: Path) -> None:
    data = replace(corpus_of(tmp_path, [chat(number) for number in range(60)]), max_documents=20)
    corpus = load_corpus(data)
    kept = list(load_corpus(data).documents("heldout"))
    assert count_held_out(corpus, tiny_tokenizer()).documents == len(kept)
    assert len(list(islice(corpus.read(), 60))) == 60
    none = replace(corpus, config=replace(data, heldout_share=0.0))
    found = count_held_out(none, tiny_tokenizer())
    assert found == HeldOutCount(documents=0, prompts=0, is_all=True)
    assert found.warning(0.0) is None


@pytest.mark.parametrize(
    ("prompts", "share", "told", "not_told"),
    [
        (7, 0.05, "too few for a report", "wide"),
        (8, 0.05, "intervals will be wide", "too few"),
        (48, 0.05, "data.heldout_share=0.1 in place of 0.05, or more documents", "too few"),
        (11, 0.05, "data.heldout_share=0.3 in place", "0.44"),
        (95, 0.4, "later, so now use more documents", "in place of"),
    ],
)
def test_few_prompts_are_warned_of_with_what_to_do(prompts: int, share: float, told: str, not_told: str) -> None:
    warning = HeldOutCount(documents=prompts, prompts=prompts, is_all=True).warning(share)
    assert warning is not None
    assert told in warning
    assert not_told not in warning
    assert f"{prompts} of the 96" in warning
    assert HeldOutCount(documents=1, prompts=96, is_all=True).warning(share) is None


def test_a_run_says_it_before_anything_is_recorded_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    run(tiny_config(tmp_path, plan=True))
    line = next(one for one in capsys.readouterr().out.splitlines() if one.startswith("held out"))
    assert "of the 96 held-out prompts that it asks for" in caplog.text
    run(tiny_config(tmp_path, prompts=PromptConfig(tokens=6, count=1, validation_count=1)))
    kept = RecordFolder.open(tmp_path / "records").manifest.held_out
    assert kept is not None
    assert line.endswith(kept.line())
    given = {"responses": "records", "from_records": str(tmp_path / "records")}
    base = tiny_config(tmp_path, "again")
    usual = {name: type(getattr(base, name))() for name in ("data", "prompts", "sampling")}
    run(replace(base, **given, **usual))
    assert read_json(tmp_path / "again" / "manifest.json")["held_out"] == kept.model_dump()


@pytest.mark.slow
def test_python_source_is_not_read_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is what a run without data= reads, whatever its target was made for."""
    run(tiny_config(tmp_path, plan=True))
    assert "(data=jsonl)" in caplog.text
    assert "the default" not in caplog.text
    files = [Document(f"{number}.py", text(number)["text"]) for number in range(90)]
    monkeypatch.setattr("distill.corpora.configured.python_stdlib", lambda: iter(files))  # its own are large
    run(tiny_config(tmp_path, plan=True, data=DataConfig()))
    assert "(data=python_stdlib; chats or text of your own: data=jsonl" in caplog.text


def test_the_share_that_is_advised_is_another_one_and_enough() -> None:
    """Two digits of 0.0235 were 0.023 again."""
    line = HeldOutCount(documents=94, prompts=94, is_all=True).warning(0.023)
    assert line is not None
    assert "data.heldout_share=0.03 in place of 0.023" in line
