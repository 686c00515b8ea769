"""Responses: what the target writes by its sampling settings, with a draft or without, and which of it is learned."""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from decode import load_drafter
from decode.common.errors import ConfigError, InputError
from decode.common.typed_config import build
from decode.models.describe import describe_model
from distill import __main__ as cli
from distill.config import DistillConfig, PromptConfig, ResponseDraftConfig, ResponseSampling
from distill.corpora.config import DataConfig
from distill.prompts.drawn_prompts import DrawnPrompt
from distill.records.record_folder import RecordFolder, RecordWriter
from distill.responses import OnResponse, Response, Writer, alike, ignored, target_sampler
from distill.runtimes import transformers_runtime
from distill.stage import run
from tests.distill.runs import check_alike, tiny_config
from tests.tiers import by_default
from tests.tiny import save_tiny_target, tiny_llama, tiny_tokenizer
from tests.train.export.saved_heads import save_head

MODEL = tiny_llama()
PROMPTS = [[5, 9, 1], [7, 3, 20, 11, 30, 2]]
CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "gone"},
    {"role": "user", "content": "Go on"},
]


class Scripted:
    """Answers every prompt with its own tokens, and keeps what it was asked."""

    def __init__(self, answer: list[int]) -> None:
        self.answer, self.asked = answer, []

    def __call__(
        self, prompts: list[list[int]], rows: list[int], seed: int, on_response: OnResponse = ignored
    ) -> list[Response]:
        self.asked.append((prompts, rows, seed))
        answers = [Response(self.answer, "eos") for _ in prompts]
        for place, one in enumerate(answers):
            on_response(place, one, None)
        return answers


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


def writer(prompts: list[DrawnPrompt], sampler: Scripted | None, positions: int = 1000, **fields: object) -> Writer:
    base = {"prompts": PromptConfig(tokens=3), "sampling": ResponseSampling(max_new_tokens=4)}
    return Writer(DistillConfig(**base | fields), chat_tokenizer(), sampler, positions, prompts)  # type: ignore[arg-type]


def greedy(prompt: list[int], tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(MODEL(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_a_response_does_not_depend_on_the_others_of_its_batch() -> None:
    sample = target_sampler(MODEL, ResponseSampling(max_new_tokens=5), batch_size=2)
    together = sample(PROMPTS, [4, 9], 3)
    assert together == [sample([PROMPTS[0]], [4], 3)[0], sample([PROMPTS[1]], [9], 3)[0]]
    assert [len(response.ids) for response in together] == [5, 5]
    assert [response.finish_reason for response in together] == ["length", "length"]


def test_texts_that_would_hold_others_up_are_written_apart_and_say_the_same() -> None:
    prompts = [[7] * 60, *PROMPTS, [9] * 30]
    prompts.sort(key=lambda prompt: -len(prompt))
    sampling = ResponseSampling(max_new_tokens=5)
    ended: list[int] = []
    apart = target_sampler(MODEL, sampling, 2, slots=40)(
        prompts, [3, 4, 9, 1], 3, lambda place, one, states: ended.append(place)
    )
    assert apart == target_sampler(MODEL, sampling, 2)(prompts, [3, 4, 9, 1], 3)
    assert sorted(ended) == [0, 1, 2, 3]
    assert alike([65, 35, 10, 9], 2, 40) == [[0], [1], [2, 3]]
    assert alike([65, 35, 10, 9], 2, 110) == [[0, 1, 2, 3]]
    assert alike([65, 35, 10, 9], 2, None) == [[0, 1, 2, 3]]


def test_on_a_gpu_short_texts_are_written_beside_long_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes as long to launch however little it reads."""
    config = tiny_config(tmp_path)
    monkeypatch.setattr(transformers_runtime, "target_sampler", lambda *given: given[-1])
    parts, lengths = {}, [*range(2000, 100, -100)]
    for device in ("cpu", "cuda"):
        one = transformers_runtime.TransformersRuntime(config, describe_model(config.target), "float32")
        monkeypatch.setattr(type(one), "model", SimpleNamespace(device=torch.device(device)))
        slots: Any = one.sampler()
        parts[device] = len(alike(lengths, 512, slots)), len(alike([10**9, *lengths], 512, slots))
    assert parts["cpu"][0] > 10
    assert parts["cuda"] == (1, 2)


def test_a_draft_changes_no_token_and_saves_passes() -> None:
    """One that is the target itself: five of its tokens are accepted, and the pass gives a sixth."""
    draft = ResponseDraftConfig("any", num_draft_tokens=5)
    sampling = ResponseSampling(max_new_tokens=12, draft=draft)
    alone = target_sampler(MODEL, sampling, batch_size=2)(PROMPTS, [4, 9], 3)
    drafted = target_sampler(MODEL, sampling, 2, load_drafter(deepcopy(MODEL), MODEL))(PROMPTS, [4, 9], 3)
    assert drafted == alone
    assert [one.passes for one in alone] == [12, 12]
    assert [one.passes for one in drafted] == [2, 2]


def test_a_response_ends_with_its_end_token_and_holds_no_padding() -> None:
    model = tiny_llama()
    first, second = (greedy(prompt, 4) for prompt in PROMPTS)
    assert first[1] not in (first[0], *second)
    model.generation_config.eos_token_id = first[1]
    sample = target_sampler(model, ResponseSampling(temperature=0.0, max_new_tokens=4), batch_size=2)
    assert sample(PROMPTS, [0, 1], 0) == [Response(first[:2], "eos"), Response(second, "length")]


def test_rows_and_seeds_have_noise_of_their_own() -> None:
    sample = target_sampler(MODEL, ResponseSampling(max_new_tokens=8), batch_size=3)
    first, second, third = sample([PROMPTS[0]] * 3, [0, 1, 2], 3)
    assert len({tuple(one.ids) for one in (first, second, third, sample([PROMPTS[0]], [0], 4)[0])}) == 4


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_every_sampling_setting_reaches_the_decoder(settings: dict[str, float]) -> None:
    """At its end each of them leaves the likeliest token alone."""
    sample = target_sampler(MODEL, ResponseSampling(max_new_tokens=4, **settings), batch_size=2)  # type: ignore[arg-type]
    assert [one.ids for one in sample(PROMPTS, [0, 1], 0)] == [greedy(prompt, 4) for prompt in PROMPTS]


def test_later_turns_and_other_runs_are_sampled_with_seeds_of_their_own() -> None:
    seeds = []
    for seed in (0, 1):
        sampler = Scripted([40])
        writer([DrawnPrompt(7, "d", "train", messages=ASKED)], sampler, seed=seed).write(0, 1)
        assert [rows for _, rows, _ in sampler.asked] == [[7], [7]]
        seeds += [asked for _, _, asked in sampler.asked]
    assert len(set(seeds)) == 4


def test_a_later_turn_is_asked_with_the_words_of_the_target() -> None:
    tokenizer = chat_tokenizer()
    said = tokenizer("so it is<eos>")["input_ids"]
    sampler = Scripted(said)  # type: ignore[arg-type]
    first, second = writer([DrawnPrompt(0, "d", "train", messages=ASKED)], sampler).write(0, 1)
    texts = [str(tokenizer.decode(prompts[0])) for prompts, _, _ in sampler.asked]
    assert texts == ["[user]Hi[assistant]", "[user]Hi[assistant]so it is[user]Go on[assistant]"]
    assert str(tokenizer.decode(first.ids)) == "[user]Hi[assistant]so it is<eos>"
    assert [one.meta["turn"] for one in (first, second)] == [0, 1]
    for one, (prompts, _, _) in zip((first, second), sampler.asked, strict=True):
        learned = [False] * len(prompts[0]) + [True] * len(said)
        assert one.loss_mask.tolist() == learned  # data.learn_prompt, which is true here, is for plain text
        assert one.meta["prompt_end"] == len(prompts[0])


@pytest.mark.parametrize(("learn_prompt", "first"), [(True, 1), (False, 3)])
def test_the_prompt_of_plain_text_is_learned_if_asked(learn_prompt: bool, first: int) -> None:
    data = DataConfig(learn_prompt=learn_prompt)
    prompt = DrawnPrompt(0, "d", "train", ids=[5, 6, 7])
    (record,) = writer([prompt], Scripted([40, 41]), data=data).write(0, 1)
    assert record.ids.tolist() == [5, 6, 7, 40, 41]
    assert record.loss_mask.tolist() == [place >= first for place in range(5)]
    whole = DrawnPrompt(0, "d", "train", ids=[5, 6, 7, 8, 9])
    (record,) = writer([whole], None, data=data, responses="corpus").write(0, 1)
    assert record.loss_mask.tolist() == [place >= first for place in range(5)]
    assert record.meta["prompt_end"] == 3


def test_a_turn_is_written_if_its_response_just_fits() -> None:
    prompt = DrawnPrompt(0, "d", "train", messages=ASKED)
    sampler = Scripted([40, 41, 42, 43])
    writer([prompt], sampler).write(0, 1)
    first, second = (len(prompts[0]) for prompts, _, _ in sampler.asked)
    for positions, written, dropped in (
        (second + 4, 2, 0),
        (second + 3, 1, 1),
        (first + 4, 1, 1),
        (first + 3, 0, 2),
    ):
        one = writer([prompt], Scripted([40, 41, 42, 43]), positions)
        assert len(one.write(0, 1)) == written
        assert one.dropped_turns == dropped


def test_a_conversation_ends_where_the_template_refuses_what_the_target_has_said() -> None:
    """Mistral's refuse an empty answer, and the run ended with it, again after each start."""
    prompts = [DrawnPrompt(0, "d", "train", messages=ASKED), DrawnPrompt(1, "e", "train", messages=ASKED[:1])]
    one = writer(prompts, Scripted([tiny_tokenizer().eos_token_id]))  # type: ignore[list-item]
    one.tokenizer.chat_template = (
        "{% for m in messages if not m.content %}{{ raise_exception('empty') }}{% endfor %}" + CHAT
    )
    assert [(record.meta["prompt"], record.meta["turn"]) for record in one.write(0, 2)] == [(0, 0), (1, 0)]
    assert one.dropped_turns == 1


def test_text_of_the_corpus_is_cut_to_the_context() -> None:
    tokenizer = chat_tokenizer()
    messages = ASKED[:2]
    answer = len(tokenizer("[user]Hi[assistant]")["input_ids"])  # type: ignore[arg-type]
    for positions, learned in ((1000, len(tokenizer("gone")["input_ids"])), (answer + 1, 1), (answer, 0)):  # type: ignore[arg-type]
        one = writer([DrawnPrompt(0, "d", "train", messages=messages)], None, positions, responses="corpus")
        records = one.write(0, 1)
        assert [(int(found.loss_mask.sum()), found.meta["prompt_end"]) for found in records] == (
            [(learned, answer)] if learned else []
        )
        assert one.dropped_turns == (0 if learned else 1)
        assert [found.meta["finish_reason"] for found in records] == [
            "corpus" if positions == 1000 else "length"
        ] * bool(learned)
    plain = DrawnPrompt(0, "d", "train", ids=[1, 2, 3, 4, 5])
    (record,) = writer([plain], None, 4, responses="corpus").write(0, 1)
    assert record.ids.tolist() == [1, 2, 3, 4]
    assert record.meta["finish_reason"] == "length"


def test_records_are_in_the_order_of_prompts_and_turns() -> None:
    """They are sampled by length, turn by turn."""
    long = [{"role": "user", "content": json.dumps(ASKED)}]
    prompts = [DrawnPrompt(0, "d", "train", messages=long), DrawnPrompt(1, "e", "train", messages=ASKED)]
    records = writer(prompts, Scripted([40])).write(0, 2)
    assert [(one.meta["prompt"], one.meta["turn"]) for one in records] == [(0, 0), (1, 0), (1, 1)]
    assert [one.meta["document"] for one in records] == ["d", "e", "e"]


K = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft that has part of its weights and so part of its tokens, a head, and two corpora."""
    folder = tmp_path_factory.mktemp("drafted")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    model = AutoModelForCausalLM.from_pretrained(save_tiny_target(folder / "target"))
    tokenizer.save_pretrained(folder / "target")
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder / "lm")
    tokenizer.save_pretrained(folder / "lm")
    for head in ("medusa", "exit_adapter"):
        save_head(folder / head, folder / "target", head)
    with (folder / "chat.jsonl").open("w") as file:
        for number in range(20):
            said = [("user", f"Hi {number}"), ("assistant", "gone"), ("user", "Go on")]
            turns = [{"role": role, "content": content} for role, content in said]
            file.write(json.dumps({"messages": turns if number % 2 else turns[:1]}) + "\n")
    return folder


def config_of(folder: Path, output: str, draft: str | None = None, chat: bool = False, **fields: Any) -> DistillConfig:
    path = str(folder / draft) if draft is not None and (folder / draft).exists() else draft
    asked = ResponseDraftConfig(path=path, num_draft_tokens=K)
    own: dict[str, Any] = {"sampling": ResponseSampling(max_new_tokens=12, draft=asked)}
    if chat:
        own["data"] = DataConfig("jsonl", str(folder / "chat.jsonl"), validation_share=0.2, heldout_share=0.0)
        own["prompts"] = PromptConfig(count=6, validation_count=1)
    return tiny_config(folder, output, **own | fields)


def drafting(folder: Path) -> list[tuple[str, int, int, float]]:
    found = RecordFolder.open(folder).manifest.drafting
    return [(one.draft.family, one.tokens, one.passes, one.tokens_per_pass) for one in found]


def written(folder: Path) -> int:
    """Tokens of all responses."""
    records = RecordFolder.open(folder)
    return sum(len(one.ids) - one.meta["prompt_end"] for one in map(records.read, range(len(records))))


@pytest.mark.parametrize("chat", by_default(1, [False, True]), ids=["plain", "chat"])
@pytest.mark.parametrize("batch_size", by_default(1, [3, 1]))
def test_records_are_those_of_the_target_alone(
    folder: Path, chat: bool, batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{chat}_{batch_size}"
    run(config_of(folder, f"alone_{name}", chat=chat, batch_size=batch_size))
    assert drafting(folder / f"alone_{name}") == []
    for draft in ("lm",) if chat else ("lm", "medusa", "exit_adapter", "ngram"):
        with caplog.at_level("INFO"):
            run(config_of(folder, f"{draft}_{name}", draft, chat, batch_size=batch_size))
        check_alike(folder / f"{draft}_{name}", folder / f"alone_{name}")
        ((family, tokens, passes, per_pass),) = drafting(folder / f"{draft}_{name}")
        assert family == draft
        assert tokens == written(folder / f"alone_{name}")
        assert per_pass == pytest.approx(tokens / passes, abs=1e-4)
        assert (
            f"responses drafted by {folder / draft if (folder / draft).exists() else draft}: {per_pass:.2f} tokens"
            in caplog.text
        )
        if draft == "lm":  # some of its tokens were accepted, and some were not
            assert 1.2 < per_pass < K


class Stopped(Exception):
    """In place of a kill."""


def stop_at(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write = RecordWriter.write

    def stopping(self: RecordWriter, index: int, records: list) -> object:
        if index == shard:
            raise Stopped
        return write(self, index, records)

    monkeypatch.setattr(RecordWriter, "write", stopping)


@pytest.mark.parametrize(("first", "then"), by_default(1, [("lm", "ngram"), ("lm", None), (None, "lm")]))
def test_a_run_goes_on_with_another_draft_or_none(
    folder: Path, first: str | None, then: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{first}_then_{then}"
    with monkeypatch.context() as patch:
        stop_at(2, patch)
        with pytest.raises(Stopped):
            run(config_of(folder, name, first, resume="auto"))
    run(config_of(folder, name, then, resume="auto"))
    run(config_of(folder, "whole", resume="auto"))
    check_alike(folder / name, folder / "whole")
    assert [family for family, *_ in drafting(folder / name)] == [one for one in (first, then) if one]
    shards = RecordFolder.open(folder / name).manifest.shards
    used = [None if one.drafting is None else one.drafting.draft.family for one in shards]
    assert used == [first, first, then, then]


def test_a_draft_that_does_not_fit_ends_with_2_before_anything_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_target(tmp_path / "wide", vocab_size=310)
    save_tiny_target(tmp_path / "short", max_position_embeddings=16)
    save_tiny_target(tmp_path / "other", seed=5)
    save_head(tmp_path / "head", tmp_path / "other", "medusa")
    monkeypatch.setattr(transformers_runtime, "load_model", None)
    corpus = config_of(folder, "unused").data.path
    data = ["data=jsonl", f"data.path={corpus}", "data.validation_share=0.2", "prompts.tokens=6"]
    base = [f"target.path={folder / 'target'}", *data, f"output_dir={tmp_path / 'out'}"]
    for given, said in [
        (f"sampling.draft.path={tmp_path / 'wide'}", "has 310 vocabulary entries"),
        (f"sampling.draft.path={tmp_path / 'head'}", "fingerprint"),
        (f"sampling.draft.path={tmp_path / 'short'}", "reads 16. Use fewer"),
        (f"sampling.draft.path={tmp_path / 'nowhere'}", "nowhere"),
        ("sampling.draft.verifier=rejection", "sampling.draft.verifier"),
        ("sampling.draft.num_draft_tokens=0", "at least 1 token"),
    ]:
        monkeypatch.setattr(sys, "argv", ["distill", *base, "sampling.max_new_tokens=24", given])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        told = capsys.readouterr().err
        assert ended.value.code == 2, told
        assert said in told
        assert not (tmp_path / "out").exists()


def test_a_draft_of_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    save_tiny_target(tmp_path / "other")
    tiny_tokenizer(299).save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="the tokenizers differ"):
        run(config_of(folder, "refused", str(tmp_path / "other")))
    assert not (folder / "refused").exists()


def test_settings_that_would_change_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="responses=corpus has it write none"):
        DistillConfig(responses="corpus", sampling=ResponseSampling(draft=ResponseDraftConfig("ngram")))
    for given in ({"adaptive": True}, {"dtype": "float32"}):
        vllm = {"target": {"path": "t", "runtime": "vllm"}, "sampling": {"draft": {"path": "some/draft", **given}}}
        with pytest.raises(ConfigError, match=f"{next(iter(given))}=.*would ignore it"):
            build(DistillConfig, vllm)


def test_settings_of_a_draft_by_name_reach_it(folder: Path) -> None:
    """Prompts of one document share words; a match of 200 tokens is never found, and nothing is drafted."""
    asked = ResponseDraftConfig("ngram", settings={"least_match": 200}, num_draft_tokens=K)
    run(config_of(folder, "unmatched", sampling=ResponseSampling(max_new_tokens=12, draft=asked)))
    ((_, tokens, passes, _),) = drafting(folder / "unmatched")
    assert tokens == passes
