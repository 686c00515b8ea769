"""Prompts: a pure function of corpus and seed, from the right split, of the right length."""

import json
from pathlib import Path

import pytest

from decode.common.errors import InputError
from distill.config import DataConfig, DistillConfig, PromptConfig, ResponseSampling
from distill.corpora import Corpus, Document, Split, load_corpus
from distill.prompts.drawn_prompts import DrawnPrompt, digest, draw_prompts, turns
from distill.prompts.tokenizer import start_ids, train_bpe
from tests.distill.starting import starting_tokenizer
from tests.tiny import tiny_tokenizer

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
